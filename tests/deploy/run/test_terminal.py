"""The terminal while things load: what is told, how often, and that only one writes at a time."""

from __future__ import annotations

import asyncio
import os
import pty
import re
from pathlib import Path

import pytest

from slipstream.deploy.run.terminal import SAY_EVERY_S, Terminal, Wait, line
from tests.deploy.stage import LIMIT_S, Stage, until


def test_the_line_names_who_is_waited_for_since_when_and_who_is_up() -> None:
    waits = [Wait("vllm-0", 100.0, Path("/logs/vllm-0.log")), Wait("vllm-1", 104.4)]
    assert line(waits, [], 112.0) == "waiting for vllm-0 for 12 s, vllm-1 for 8 s"
    assert line(waits, ["queue"], 112.0, logs=True) == (
        "waiting for vllm-0 for 12 s (its log: /logs/vllm-0.log), vllm-1 for 8 s; up: queue"
    )


def test_i7_without_a_terminal_a_line_says_it_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = 1000.0
    with Terminal(lambda: now) as terminal:
        with terminal.waiting_for("queue"):
            now += 5
        for name in ("queue", "worker-0"):
            terminal.up(name)
        terminal.down("worker-0")
        with terminal.waiting_for("vllm-0"):
            for _ in range(65):
                now += 1
                terminal.tell()
        terminal.tell()
    assert capsys.readouterr().out.splitlines() == [
        f"slipstream: waiting for vllm-0 for {seconds:g} s; up: queue" for seconds in (SAY_EVERY_S, 2 * SAY_EVERY_S)
    ]


async def test_it_wakes_only_while_somebody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told = asyncio.Event()
    with Terminal() as terminal:
        monkeypatch.setattr(terminal, "tell", told.set)
        monkeypatch.setattr("slipstream.deploy.run.terminal.DRAW_EVERY_S", 0.0)
        telling = asyncio.create_task(terminal.keep_telling())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not told.is_set()
        with terminal.waiting_for("queue"):
            await asyncio.wait_for(told.wait(), 10)
        telling.cancel()


def test_on_a_terminal_the_live_line_ends_when_the_learner_first_prints(stage: Stage) -> None:
    """The learner has a terminal of the same size, and what it prints arrives as it is, to the last byte."""
    ours, theirs = pty.openpty()
    stage.play(
        vllm="until [ -e serve ]; do sleep 0.1; done; " + stage.answers("vllm"),
        learner="[ -t 1 ] && until [ -e speak ]; do sleep 0.1; done; printf 'step 1\\r'; sleep 2.5; printf 'step 2\\n'",
    )
    process = stage.start(stdout=theirs)
    os.close(theirs)
    seen = b""

    def read_until(pattern: bytes) -> None:
        nonlocal seen
        while not re.search(pattern, seen):
            try:
                seen += os.read(ours, 4096)
            except OSError:  # it has ended
                break
        assert re.search(pattern, seen), seen

    read_until(rb"waiting for (queue for \d s, )?vllm-0 for \d")
    (stage.folder / "speak").touch()
    read_until(rb"step 1\r")
    before, _, _ = seen.partition(b"step 1\r")
    read_until(rb"step 2\r\n")
    assert before.endswith((b"\x1b[2K", b"\x1b[?25h", b"\r", b"\x1b[1A\x1b[2K")), before[-80:]
    read_until(rb"learner is done")
    assert b"waiting for" not in seen[len(before) :], "the live line came back over the learner's"
    assert process.wait(LIMIT_S) == 0
    os.close(ours)
    until(lambda: not stage.alive())
