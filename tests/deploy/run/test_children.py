"""What a child logs, and what is told of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from slipstream.deploy.run import processes
from slipstream.deploy.run.processes import MAX_LINE, Child, Children, Program, describe_end
from tests.deploy.stage import until


async def run_to_its_end(tmp_path: Path, script: str, children: Children) -> Child:
    child = children.start(Program("it", "worker", ["bash", "-c", script]), tmp_path)
    until(lambda: child.poll() is not None)
    await children.end([child])
    return child


@pytest.mark.parametrize(
    ("logged", "first"),
    [
        ("starting\n2026-01-01 INFO all is well\n", None),
        ("error_rate = 0, errors: none\n", None),
        ("INFO a\n2026-01-01 ERROR x: it broke\nERROR later\n", "2026-01-01 ERROR x: it broke"),
        ("Traceback (most recent call last):\n  File\nValueError: no\n", "ValueError: no"),
        ("torch.OutOfMemoryError: CUDA\n", "torch.OutOfMemoryError: CUDA"),
        ("waiting\nslipstream: queue.port = 1: no\n", "slipstream: queue.port = 1: no"),
        ("\xff\xfe\nCRITICAL bytes\n", "CRITICAL bytes"),
        ("", None),
    ],
)
async def test_the_first_line_that_reports_an_error(tmp_path: Path, logged: str, first: str | None) -> None:
    (tmp_path / "text").write_text(logged, encoding="latin-1")
    with Children(grace_s=5) as children:
        child = await run_to_its_end(tmp_path, f"cat '{tmp_path}/text'", children)
    assert child.first_error() == first


async def test_a_second_life_does_not_tell_of_the_first_and_a_long_log_is_not_read_whole(tmp_path: Path) -> None:
    with Children(grace_s=5) as children:
        await run_to_its_end(tmp_path, "echo ERROR of the first", children)
        again = await run_to_its_end(tmp_path, "echo ERROR long ago; seq 100000; echo the end", children)
    assert again.first_error() is None
    assert again.tail()[-1] == "the end"
    assert len(again.tail()) < 20_000
    assert again.log.read_text().startswith("ERROR of the first\nERROR long ago\n1\n")


async def test_of_a_log_that_grows_too_long_the_first_and_the_newest_lines_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 40_000)
    monkeypatch.setattr(processes, "LOG_HEAD_BYTES", 100)
    monkeypatch.setattr(processes, "LOG_KEPT_BYTES", 1000)
    script = f"echo first; seq 10000; touch '{tmp_path}/whole'; until [ -f '{tmp_path}/on' ]; do sleep 0.01; done; echo"
    with Children(grace_s=5) as children:
        child = children.start(Program("it", "worker", ["bash", "-c", f"{script} ERROR the end"]), tmp_path)
        until((tmp_path / "whole").exists)
        assert child.bound_log()
        (tmp_path / "on").touch()
        until(lambda: child.poll() is not None)
        await children.end([child])
        text = child.log.read_text()
        assert not child.bound_log()
    assert text.startswith("first\n1\n2\n")
    assert "bytes of this log were dropped here]\n" in text
    assert text.endswith("\n10000\nERROR the end\n")
    assert len(text) < 1300
    assert child.first_error() == "ERROR the end"


ENGINE = "(EngineCore pid=9) ERROR 11-22 16:00:00 [core.py:1512] "


async def test_a_servers_first_error_is_its_engines_however_much_follows(tmp_path: Path) -> None:
    """vLLM logs a traceback for each request that fails by the end of its engine."""
    own = [
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        "  File",
        "IndexError: index 6",
    ]
    follows = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    text = (
        "".join(f"{ENGINE}{line}\n" for line in own)
        + f"(APIServer pid=7) ERROR 11-22 16:00:01 [a.py:4] {follows}\n" * 9999
    )
    (tmp_path / "text").write_text(text)
    with Children(grace_s=5) as children:
        child = await run_to_its_end(tmp_path, f"cat '{tmp_path}/text'", children)
    assert all("IndexError" not in line for line in child.tail())
    assert child.first_error() == "IndexError: index 6"


def test_an_exit_code_above_128_is_a_signal_where_there_is_one() -> None:
    assert describe_end("it", 128 + signal.SIGSEGV) == "it ended with code 139 (SIGSEGV)"
    assert describe_end("it", 255) == "it ended with code 255"
    assert describe_end("it", 3) == "it ended with code 3"


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with Children(grace_s=5) as children, pytest.raises(FileNotFoundError):
        children.start(Program("it", "worker", ["/no/such/program"]), tmp_path)


async def test_a_log_is_told_without_what_would_act_on_a_terminal(tmp_path: Path) -> None:
    with Children(grace_s=5) as children:
        script = r"printf '\033[31mERROR red\033[0m \007bell\n'; head -c 5000 /dev/zero | tr '\0' x"
        child = await run_to_its_end(tmp_path, script, children)
    assert child.first_error() == "ERROR red bell"
    assert max(map(len, child.tail())) <= MAX_LINE


async def test_a_remedy_is_quoted_to_its_end(tmp_path: Path) -> None:
    """That of a destroyed policy has 900 characters, the command to type last."""
    with Children(grace_s=5) as children:
        child = await run_to_its_end(tmp_path, f"echo 'slipstream: {'x' * 900} --resume'", children)
    assert (child.first_error() or "").endswith("--resume")


async def test_logs_go_on_where_their_folder_was_deleted(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with Children(grace_s=5) as children:
        await run_to_its_end(logs, "echo one", children)
        (logs / "it.log").unlink()
        logs.rmdir()
        child = await run_to_its_end(logs, "echo two", children)
    assert child.tail() == ["two"]


def end_the_input(children: Children) -> psutil.Process:
    """Close the pipe to the guard, as it closes when the supervisor dies. Returns the guard."""
    process = children.guard._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    return psutil.Process(process.pid)


async def test_a_guard_that_is_killed_is_replaced_and_knows_the_children(tmp_path: Path) -> None:
    with Children(grace_s=1) as children:
        child = children.start(Program("it", "worker", ["sleep", "300"]), tmp_path)
        first = children.guard.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: (children.reap(), children.guard.pid != first)[1])  # as SIGCHLD has it called
        await asyncio.to_thread(end_the_input(children).wait, 30)
        until(lambda: child.poll() == 128 + signal.SIGTERM)
        children.reap()  # starts a third one, as the second has done its work
        await children.end([child])


async def test_a_child_that_stays_is_killed_after_the_grace_where_the_supervisor_is_gone(tmp_path: Path) -> None:
    with Children(grace_s=0.5) as children:
        child = children.start(Program("it", "worker", ["bash", "-c", "trap '' TERM; echo up; sleep 300"]), tmp_path)
        until(lambda: child.tail() == ["up"])
        started = time.monotonic()
        await asyncio.to_thread(end_the_input(children).wait, 30)
        assert time.monotonic() - started > 0.4
        until(lambda: child.poll() == 128 + signal.SIGKILL)
        children.reap()
        await children.end([child])


async def test_a_guard_that_stands_still_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.deploy.run.processes.KILLED_WITHIN_S", 0.5)
    with Children(grace_s=1) as children:
        await run_to_its_end(tmp_path, "exit", children)
        guard = psutil.Process(children.guard.pid)
        os.kill(guard.pid, signal.SIGSTOP)
        started = time.monotonic()
    assert time.monotonic() - started < 30
    assert not guard.is_running()
