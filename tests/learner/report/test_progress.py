"""What a person sees of a run: phases, steps, notices, rollouts, and the curve next to them."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
from rich.console import Console

from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.report import queue_status, rollouts, summary
from slipstream.learner.report.progress import TerminalProgress, line, waits_of
from slipstream.learner.report.queue_status import Watch
from slipstream.learner.report.summary import Curve
from slipstream.protocol.client import QueueClient, Unreachable
from slipstream.protocol.messages import Server, ServerState
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Cause, GroupCounts, Notice, Stall, Status, Wait, WorkerActivity, WorkerStatus
from tests.kit.learner import FakeQueue, status
from tests.learner.report.test_summary import step_record


class Screen:
    """A progress on a made-up terminal or file, with its own clock."""

    def __init__(self, width: int = 80, terminal: bool = True, total_steps: int = 100, log: bool = False) -> None:
        self.file = io.StringIO()
        console = Console(file=self.file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
        self.now = 0.0
        self.progress = TerminalProgress(total_steps, 16, console, clock=lambda: self.now, log=log)

    @property
    def lines(self) -> list[str]:
        """Return what was written, without cursor movements; a live line is there as often as it was drawn."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return [part for part in re.split(r"[\r\n]+", plain) if part.strip()]


LOADING = status(
    servers=[Server("vllm-0", "http://a", ServerState.SERVING), Server("vllm-1", "http://b", ServerState.JOINING)],
    groups=GroupCounts(48, 3, 1, 52, 0, 100, 10**9, 64),
    waits=[Wait("learner", "groups", 9.0), Wait("worker-0", "a ticket", 12.0)],
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_on_a_terminal_is_wider_than_it(width: int) -> None:
    screen = Screen(width, total_steps=10_000)
    screen.progress.status = LOADING
    with screen.progress:
        for step in (1, 9_999):
            with screen.progress.phase("waiting for groups"):
                screen.now += 4_000
                screen.progress.tick()
                screen.progress.show(step_record(step))
        screen.progress.warn("worker-0: " + "reward gave 3 values for 4 completions, in /a/task.py " * 4)
        screen.progress.say("figures in " + "/a/long/path" * 20)
        screen.progress.show_rollout(VIEW)
    assert max(len(text) for text in screen.lines) <= width
    assert any("step" in text for text in screen.lines)


def test_a_step_shows_as_much_as_fits_and_the_time_left() -> None:
    record = step_record(10)
    whole = "step  10/100 | reward 0.500 | 0:03:00 left | 2.00 s, 25% waiting | staleness 1.00 (max 1) | 60 tokens/s"
    assert line(record, 100, 180.0) == whole
    assert line(record, 100, 180.0, depth=3.5, width=200) == f"{whole} | depth 3.5"
    assert line(record, 100, 180.0, depth=3.5, width=70) == whole.split(" | staleness")[0]
    assert line(record, 100, 59.6, width=46) == "step  10/100 | reward 0.500 | 60 s left"
    assert line(record, 100, 180.0, width=5) == "step  10/100"


def test_a_step_s_time_left_follows_the_newest_steps() -> None:
    screen = Screen(terminal=False)
    for step in range(1, 51):
        times = replace(step_record(step).times, step_s=10.0 if step <= 30 else 2.0)
        screen.progress.show(replace(step_record(step), times=times))
    assert "0:11:30 left" not in screen.lines[0]
    assert "0:16:30 left" in screen.lines[0]
    assert "0:01:40 left" in screen.lines[-1]


def test_a_log_file_gets_a_line_now_and_then() -> None:
    screen = Screen(200, terminal=False, total_steps=25)
    with screen.progress:
        for step in range(1, 26):
            screen.now += 1
            screen.progress.show(step_record(step))
    assert [text.split("|")[0] for text in screen.lines] == ["step  1/25 ", "step 10/25 ", "step 20/25 ", "step 25/25 "]


def test_every_step_is_in_the_log_and_each_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream.learner")
    screen = Screen(log=True)
    with screen.progress:
        for step in (1, 2, 3):
            screen.progress.show(step_record(step))
        screen.progress.warn("the reward is wrong")
    assert [record.message.split(" | ")[0] for record in caplog.records] == [
        *(f"step   {step}/100" for step in (1, 2, 3)),
        "the reward is wrong",
    ]
    assert caplog.records[-1].levelname == "WARNING"


def test_phases_name_who_waits_for_what_and_since_when() -> None:
    screen = Screen(160)
    with screen.progress, screen.progress.phase("waiting for groups"):
        screen.progress.status = LOADING
        screen.now = 75.0
        screen.progress.tick()
    assert screen.lines[-1] == (
        "0:01:15 waiting for groups: vllm-1 is joining; 4 of 16 groups, 48 in work; no worker is connected; "
        "worker-0 waits for a ticket, 12 s"
    )
    assert waits_of(status(), 16) == "no server has registered; no worker is connected"


def test_i7_what_many_workers_and_servers_wait_for_is_said_once() -> None:
    many = status(
        workers=[
            WorkerStatus(f"w{number}", "", *[0] * 9, wait_share=0.0, cpu_ms_per_episode=None, seen_s_ago=30.0 + number)
            for number in range(2000)
        ],
        servers=[Server(f"s{number}", "http://s", ServerState.STALE) for number in range(200)],
        waits=[Wait("200 servers", "newer weights: stale", 9.0, 200), Wait("1,998 workers", "a ticket", 12.0, 1998)],
    )
    assert waits_of(many, 16) == (
        "200 servers are stale; 1,999 workers silent for 2029 s; 1,998 workers wait for a ticket, 12 s"
    )


def test_a_long_phase_is_said_in_a_file_now_and_then_and_a_short_one_never() -> None:
    screen = Screen(200, terminal=False)
    with screen.progress, screen.progress.phase("loading the model ./m"):
        for screen.now in range(70):
            screen.progress.tick()
    assert screen.lines == [f"{said} loading the model ./m" for said in ("2 s", "32 s", "0:01:02")]
    screen.progress.show(step_record(1))
    with screen.progress.phase("waiting for groups"):
        screen.now += 20
        screen.progress.tick()
    assert len(screen.lines) == 4


def watching(
    queue: FakeQueue,
    screen: Screen,
    monkeypatch: pytest.MonkeyPatch,
    until: Callable[[], bool],
    turns: Sequence[Status] = (),
) -> None:
    """Watch a queue that shows one after another of `turns`, and the last of them `until` that is so."""
    monkeypatch.setattr(queue_status, "ASK_EVERY_S", 0.001)
    seen, asked, left = threading.Event(), queue.status, deque(turns)

    async def status_and_look() -> object:
        if left:
            queue.shown = left.popleft()
        elif until():
            seen.set()
        return await asked()

    queue.status = status_and_look  # type: ignore[method-assign,assignment]
    with BlockingQueueClient(cast(QueueClient, queue)) as client, Watch(client, screen.progress):
        assert seen.wait(5)


def test_notices_are_said_once_while_the_learner_waits_and_the_alarm_with_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, screen = FakeQueue(), Screen(200, terminal=False)
    notice = Notice(1, "reward", "accuracy gave 3 values for 4 completions, in task.py:7; return one for each", "w0", 1)
    turns = [
        status(notices=[notice]),
        status(notices=[notice], stall=Stall(True, 130.0, "no worker is connected; start one")),
        status(notices=[notice, Notice(2, "server", "vllm-0 is down", None, 0)], stall=Stall(True, 140.0, "the same")),
        status(notices=[Notice(1, "task", "another notice of a queue that was restarted", None, 0)]),
    ]

    watching(queue, screen, monkeypatch, lambda: len(screen.lines) == 5, turns)
    assert screen.lines == [
        "! w0: accuracy gave 3 values for 4 completions, in task.py:7; return one for each",
        "! stalled: no step for 130 s: no worker is connected; start one",
        "! vllm-0 is down",
        "! another notice of a queue that was restarted",
        "no longer stalled",
    ]


def test_i7_a_server_that_leaves_service_is_said_each_time_and_when_it_serves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue's notice of one text comes once."""

    def now(state: ServerState, *notices: Notice) -> Status:
        reason = "its process ended" if state is ServerState.DOWN else None
        return status(servers=[Server("vllm-0", "http://a", state, reason=reason)], notices=[*notices])

    down = Notice(1, "server", "vLLM server vllm-0 at http://a is down: its process ended", None, 0)
    up, out, back = now(ServerState.SERVING), now(ServerState.DOWN, down), now(ServerState.SYNCING, down)
    queue, screen = FakeQueue(), Screen(200, terminal=False)
    watching(queue, screen, monkeypatch, lambda: len(screen.lines) == 4, [up, out, out, back, up, out, back, up])
    assert (
        screen.lines
        == [
            "! vLLM server vllm-0 at http://a is down: its process ended",
            "vLLM server vllm-0 serves again, after 0 s",
        ]
        * 2
    )


S = ServerState


@pytest.mark.parametrize(
    ("turns", "lines"),
    [
        # One that joins, or is drained on purpose, is no news.
        ([(0, S.JOINING), (30, S.SERVING), (60, S.DRAINING), (70, S.DOWN), (90, S.SERVING)], []),
        # Behind for a moment: it happens to each now and then.
        ([(0, S.SERVING), (10, S.STALE), (12, S.SYNCING), (13, S.SERVING)], []),
        (
            [(0, S.SERVING), (10, S.STALE), (14, S.STALE), (16, S.STALE), (21, S.SERVING)],
            ["! vLLM server a at http://a is stale: why", "vLLM server a serves again, after 11 s"],
        ),
        # A restart is told by who restarts it.
        ([(0, S.SERVING), (10, S.JOINING), (50, S.SERVING)], ["vLLM server a serves again, after 40 s"]),
        (
            [(0, S.SERVING), (10, S.SYNCING), (11, S.QUARANTINED), (12, S.SYNCING), (13, S.SERVING)],
            ["! vLLM server a at http://a is quarantined: why", "vLLM server a serves again, after 3 s"],
        ),
    ],
)
def test_which_of_a_servers_turns_are_said(turns: list[tuple[float, ServerState]], lines: list[str]) -> None:
    seen = queue_status.ServersSeen()
    said = [
        f"! {text}" if warns else text
        for at, state in turns
        for warns, text in seen.look([Server("a", "http://a", state, reason="why")], [], at)
    ]
    assert said == lines


def test_i7_a_queue_that_does_not_answer_is_said_and_when_it_does_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped: nothing else can say so."""
    monkeypatch.setattr(queue_status, "SILENT_AFTER_S", 0.01)
    queue, screen = FakeQueue(), Screen(200, terminal=False)
    asked, times = queue.status, 0

    async def slow() -> Status:
        nonlocal times
        times += 1
        while times == 2 and not screen.lines:  # noqa: ASYNC110 (a thread writes them)
            await asyncio.sleep(0.001)
        return await asked()

    queue.status = slow  # type: ignore[method-assign]
    queue.shown = status()
    watching(queue, screen, monkeypatch, lambda: times > 3)
    assert screen.lines[0].startswith("! the queue has not answered for 0 s: ")
    assert screen.lines[1:] == ["the queue answers again, after 0 s"]


def test_causes_are_said_again_as_long_as_they_last_and_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, screen = FakeQueue(), Screen(200, terminal=False)
    tool = Cause("tool search", "tool search fails in 8 of its newest 8 calls", "bad", 0.0)
    later = Cause("tool search", "tool search fails in 64 of its newest 64 calls", "bad", 599.0)
    long_after = msgspec.structs.replace(later, since_s=601.0)
    refused = Cause("refused workers", "a worker is refused: the tokenizer differs", "bad", 0.0)
    told = Notice(1, "fingerprint", "the tokenizer differs", "w0", 0)
    turns = [
        status(diagnosis=[tool]),
        status(diagnosis=[later]),
        status(diagnosis=[long_after, refused], notices=[told]),
        status(diagnosis=[refused], notices=[told]),
    ]

    watching(queue, screen, monkeypatch, lambda: len(screen.lines) == 4, turns)
    assert screen.lines == [
        "! tool search fails in 8 of its newest 8 calls",
        "! w0: the tokenizer differs",
        "! still, after 10 min: tool search fails in 64 of its newest 64 calls",
        "no longer seen: tool search",
    ]


def test_i7_refused_workers_are_not_called_silent() -> None:
    def worker(name: str, does: WorkerActivity) -> WorkerStatus:
        return WorkerStatus(name, "", *[0] * 9, wait_share=0.0, cpu_ms_per_episode=None, seen_s_ago=90.0, does=does)

    shown = status(workers=[worker("a", "refused"), worker("b", "left"), worker("c", "silent")])
    assert waits_of(shown, 16) == "no server has registered; a is refused; c silent for 90 s"


def test_a_queue_that_is_away_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, screen = FakeQueue(), Screen(terminal=False)
    queue.shown = status(notices=[Notice(1, "tool", "broken", None, 0)])
    answer, failures = queue.status, [Unreachable("away"), Unreachable("away")]

    async def away() -> object:
        if failures:
            raise failures.pop()
        return await answer()

    queue.status = away  # type: ignore[method-assign,assignment]
    watching(queue, screen, monkeypatch, lambda: bool(screen.lines))
    assert screen.lines == ["! broken"]


VIEW = RolloutView(
    ticket_id="t1",
    index=7,
    epoch=0,
    number=2,
    worker_id="w0",
    reward=0.75,
    reward_components={"accuracy": 1.0, "style": None},
    finish_reason="stop",
    turns=2,
    tool_calls=3,
    tool_failures=1,
    sampled_tokens=41,
    versions=(3, 4),
    messages=[
        {
            "role": "assistant",
            "content": "I multiply.",
            "tool_calls": [
                {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}},
                {"type": "function", "function": {"name": "multiply", "arguments": '{"a": 5}'}},
                {"type": "function", "function": {"name": "search", "arguments": "not json"}},
            ],
        },
        {"role": "tool", "name": "multiply", "content": "12"},
        {"role": "tool", "name": "multiply", "content": "error: b is missing"},
        {"role": "assistant", "content": "[12]" + " and so on" * 200},
        {"role": "assistant", "content": [{"type": "text", "text": "in parts"}]},
    ],
    step=5,
    staleness=1,
    advantage=-0.5,
)


def shown(view: RolloutView, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(rollouts.render_rollout(view))
    return [text.rstrip() for text in cast(io.StringIO, console.file).getvalue().splitlines()]


def test_a_rollout_is_read_with_its_calls_folded() -> None:
    text = shown(VIEW, width=140)
    assert text[:5] == [
        "rollout of step 5: reward 0.75 (accuracy 1, style none), advantage -0.5",
        "row 7, epoch 0, ended by stop, 2 turns, 3 tool calls, 1 failed, 41 tokens, versions 3 to 4, staleness 1, "
        "worker w0",
        "  assistant: I multiply.",
        "  multiply(a=3, b=4) -> 12",
        "  multiply(a=5) -> error: b is missing",
    ]
    assert text[5].startswith("  assistant: [12] and so on and")
    assert text[-2:] == ["  assistant: in parts", "  search(not json) (no result)"]
    assert any("more characters)" in row for row in text)
    kept = "  its messages were not kept: set worker.keep_messages = true"
    assert shown(replace_view(messages=None))[-1] == kept


def replace_view(**changes: object) -> RolloutView:
    fields = {name: getattr(VIEW, name) for name in VIEW.__struct_fields__}
    return RolloutView(**{**fields, **changes})


def test_the_policy_s_text_is_shown_as_it_is() -> None:
    """Neither markup nor what acts on a terminal."""
    text = "\n".join(shown(replace_view(messages=[{"role": "assistant", "content": "[bold]x[/bold] \x1b[31mred\x07"}])))
    assert "[bold]x[/bold]" in text
    assert "\x1b" not in text
    odd = replace_view(
        messages=[{"role": "user\x1b[2J", "content": "x"}], worker_id="w\x1b[2J", reward_components={"a\x1b[2J": 1.0}
    )
    assert "\x1b" not in "\n".join(shown(odd))
    assert "\x07" not in text


def test_the_rollout_text_needs_no_torch() -> None:
    code = (
        "import sys, slipstream.learner.report.rollouts; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_reward_curve_is_a_picture_and_a_line_of_text(tmp_path: Path) -> None:
    summary.draw_rewards(tmp_path / "reward.png", [1, 2], [0.0, 1.0])
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["reward.png"], "or it was not put there in one piece"
    assert summary.sparkline([0.0, 0.5, 1.0]) == "▁▅█ 0.000 to 1.000"
    assert summary.sparkline([0.0, 1.0, 1.0, 1.0], width=2) == "▁█ 0.500 to 1.000"
    assert summary.sparkline([0.3] * 100, width=20) == "▁" * 20 + " 0.300 to 0.300"
    assert summary.sparkline([]) == ""
    assert summary.smoothed([0.0, 1.0, 2.0]) == [0.0, 0.5, 1.0]


def test_the_curve_s_steps_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))[1])
    for steps in ([1], [1, 2], [1, 2, 3], list(range(1, 300))):
        summary.draw_rewards(tmp_path / "reward.png", steps, [0.5] * len(steps))
        ticks = np.array(drawn[-1].axes[0].get_xticks())
        assert (ticks == ticks.round()).all(), steps


def test_drawings_keep_the_pixels_of_one(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        for steps in ([1], [1, 2], [1, 2, 3]):
            summary.draw_rewards(tmp_path / "reward.png", steps, [0.5] * len(steps))
        assert [type(each).__name__ for each in gc.get_objects()].count("RendererAgg") == 1
    finally:
        gc.enable()


def test_the_curve_grows_beside_the_training_and_a_fault_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drawn: list[tuple[int, str]] = []
    monkeypatch.setattr(
        summary, "draw_rewards", lambda path, steps, *_: drawn.append((len(steps), threading.current_thread().name))
    )
    now = 0.0
    growing = Curve(tmp_path / "reward.png", clock=lambda: now)
    for step in range(1, 101):
        now = step
        growing.grow([step_record(i) for i in range(1, step + 1)])
        if growing.drawing is not None:
            growing.drawing.result()
    assert drawn == [(steps, "curve_0") for steps in (30, 60, 90)]
    monkeypatch.setattr(summary, "draw_rewards", lambda *_: 1 / 0)
    growing.finish([])
    assert "reward.png could not be drawn" in caplog.text


def test_a_terminal_that_is_gone_does_not_end_the_learner(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    progress = TerminalProgress(3, console=Console(file=Gone()), log=True)
    with progress:
        for _ in range(2):
            progress.say("a line")
    told = [record.getMessage() for record in caplog.records if "nothing more can be shown" in record.getMessage()]
    assert len(told) == 1
    assert "Broken pipe" in told[0]


def test_a_command_is_never_broken_into_lines() -> None:
    screen = Screen(40)
    command = "continue with: slipstream up " + "a-very-long-folder/" * 5 + "run.toml --resume"
    with screen.progress:
        screen.progress.say(command, whole=True)
    assert command in screen.file.getvalue()
