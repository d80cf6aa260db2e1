"""`slipstream status`: what the queue says of itself is all there to read, within 80 columns too."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from slipstream.deploy.commands.status import of_run, render
from slipstream.protocol.config import ConfigError
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import (
    Cause,
    ConnectionStatus,
    Evaluation,
    GroupCounts,
    LearnerStatus,
    Limit,
    Notice,
    Rates,
    RowsStatus,
    Scaling,
    ServerStatus,
    Staleness,
    Stall,
    Status,
    TicketCounts,
    Wait,
    WorkerStatus,
)
from tests.kit.status import status


def a_status() -> Status:
    worker = WorkerStatus(
        *("gpu-node-17.cluster.example-4711-ab12", "gpu-node-17", 4711, 128, 96, 1031, 2, 123456, 2040, 3, 4),
        wait_share=0.25,
        cpu_ms_per_episode=3.5,
        seen_s_ago=2.2,
        failures={"tool:multiply": 3},
        hung_calls=5,
        episodes_generating=40,
        episodes_waiting=3,
        episodes_in_tools=20,
        episodes_in_judgement=16,
        full_share=0.25,
    )
    return Status(
        run="quickstart",
        uptime_s=100.0,
        version=41,
        served_version=40,
        step=41,
        total_steps=60,
        checkpoint_step=40,
        finished=False,
        max_staleness=4,
        depth=2.1875,
        depth_target=2.25,
        groups=GroupCounts(12, 7, 16, 35, 2_500_000, 10_000, 2 * 1024**3, 36),
        staleness=Staleness(1.25, 3, 4, 0.75, 0.5),
        rates=Rates(15.5, 9000.0, 8500.0, 0.9, 1500.0),
        learner=LearnerStatus(
            *(1, 41, 41, 0.875, 1.1, 0.1, 0.5),
            {"sampler/ratio_p1": 0.94, "sampler/ratio_p50": 1.0, "sampler/ratio_p99": 1.0625, "ess": 0.98, "mfu": 0.31},
        ),
        workers=[worker],
        servers=[
            ServerStatus("vllm-0", "http://127.0.0.1:8100", ServerState.SERVING, 40),
            ServerStatus("vllm-1", "http://127.0.0.1:8101", ServerState.QUARANTINED, 39, "probe differs by 0.31"),
        ],
        waits=[Wait("learner", "publication", 12.3), Wait("worker w1", "tickets", 4.0)],
        stall=Stall(False, 0.0),
        ledger=TicketCounts(100, 60, 3, 2, 35),
        learner_wait_share=0.125,
        worker_wait_share=0.5,
        drops={"overage": 3},
        tokens_sampled=100_000,
        tokens_dropped={"overage": 5_000, "zero_variance": 25_000},
        rows=RowsStatus(4000, 21, 9, 0.0, 1.0, [16, 0, 1, 4]),
        limit=Limit("learner", "The learner limits the run: the learner waits 12%."),
        scaling=Scaling({"server": 0.0, "worker": 0.021, "rank": 0.4}, 1, 1),
        rejections={"nan_logprobs": 2},
        evaluations=[
            Evaluation(30, 30, 1, rows=32, done=31, failed=1, ended="complete", reward=0.625, seconds=9.0),
            Evaluation(40, 40, 1, rows=32, done=12, failed=1, seconds=3.0),
            Evaluation(41, 41, 1, waits_for="a server that serves", seconds=1.0),
        ],
    )


def shown(status: Status, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(status))
    return capture.get()


@pytest.mark.parametrize(
    "fact",
    [
        "run quickstart  step 41/60  version 41, served 40  reward 0.875",
        "limit        The learner limits the run: the learner waits 12%.",
        "one more     server +0%, worker +2%, rank +40% steps a second",
        "35 of at most 36 = 12 at workers + 7 ready + 16 with the learner",
        "work ahead   2.19 optimiser steps, aims at 2.25",
        "2.5 MB of 2147 MB",
        "1.25 versions on average = 0.75 while played + 0.50 in the queue; highest 3, ever 4, bound 4",
        "9000 tokens sampled, 8500 trained",
        "untrained    30% of the sampled tokens taught nothing (overage 5000, zero_variance 25 k); 15% in the last",
        "rows         21 of 4,000 tried, 9 of them teach; by mean reward 0 |█ ▁▂| 1",
        "policy       ratio to the sampler 1, 0.94 to 1.06 for 98 % of the tokens, effective sample size 98%, FLOPs",
        "learner 12%, workers 50%",
        "now waiting  learner for publication, 12.3 s",
        "worker w1 for tickets, 4.0 s",
        "gpu-node-17.cluster.example-4711-ab12",
        "40/128",
        "96 episodes open: 40 generating, 3 waiting, 20 in tools, 16 in judgement, 17 over; slots idle at "
        "worker.open_episodes: 25%",
        "2040/3",
        "evaluation   of step 30: reward 0.625 (31 of 32 rows, 9.0 s)",
        "evaluation   of step 40: 12 of 32 rows done, 1 failed, 3 s",
        "evaluation   of step 41: 0 of its rows done, 1 s; waits for a server that serves",
        "hung: 5 calls of user code are still running after their time-out",
        "quarantined",
        "probe differs by 0.31",
        "dropped: overage 3",
        "rejected: nan_logprobs 2",
    ],
)
def test_i7_a_status_shows(fact: str) -> None:
    assert fact in shown(a_status(), width=200)


def test_the_diagnosis_stands_above_the_notices_and_a_refused_worker_is_called_so() -> None:
    status = a_status()
    status.notices = [Notice(1, "tool", "tool search: KeyError", "w", 3.0)]
    status.diagnosis = [
        Cause("tool search", "fails in 9 of its newest 9 calls", "bad", 240.0),
        Cause("refused workers", "the tokenizer differs \x1b[2J", "warn", 3.0),
    ]
    status.workers[0].does, status.workers[0].reason = "refused", "the tokenizer differs"
    lines = shown(status, width=200).splitlines()
    assert lines[1].split("  ")[0] == "tool search, for 4 min"
    assert lines[1].rstrip().endswith("fails in 9 of its newest 9 calls")
    assert lines[2].startswith("refused workers, for 3 s")
    assert "\x1b" not in lines[2]
    assert lines[3].startswith("! 3 s ago")
    assert next(line for line in lines if "gpu-node" in line).rstrip().endswith("refused")


def test_i7_a_stall_is_the_second_line_with_its_cause() -> None:
    status = a_status()
    status.stall = Stall(True, 130.0, "no server serves; vllm-1 is quarantined")
    assert shown(status).splitlines()[1].startswith("STALLED for 130 s: no server serves; vllm-1 is quarantined")
    assert "STALLED" not in shown(a_status())


def test_a_queue_without_anybody_is_shown_too() -> None:
    status = a_status()
    status.workers, status.servers, status.waits, status.drops, status.rejections = [], [], [], {}, {}
    status.learner = LearnerStatus()
    status.served_version = status.learner_wait_share = status.worker_wait_share = None
    text = shown(status)
    for fact in ("served -", "learner -, workers -", "waiting  nobody", "no workers", "no servers"):
        assert fact in text
    assert "dropped" not in text


def test_a_slow_server_is_called_so_with_the_remedy_and_what_came_back_is_counted() -> None:
    status = a_status()
    status.servers[0].state, status.servers[0].slow = ServerState.SERVING, "lower vllm.max_num_seqs = 64"
    status.notices = [Notice(1, "server", "vllm-0 is down", None, 3.0, times=4, first_s=660.0)]
    lines = shown(status, width=240).splitlines()
    (row,) = [line.split() for line in lines if "lower vllm.max_num_seqs = 64" in line]
    assert row[:2] == [status.servers[0].name, "slow"]
    assert any("vllm-0 is down (seen 4 times in 11 min)" in line for line in lines)


def test_thousands_of_workers_are_a_few_rows_and_a_sum() -> None:
    status = a_status()
    (worker,) = status.workers
    status.workers = [
        msgspec.structs.replace(worker, worker_id=f"w{number}", does="in_tools" if number % 4 else "left")
        for number in range(2000)
    ]
    status.waits = [Wait("1,998 workers", "a ticket", 12.0, 1998)]
    status.notices = [Notice(1, "tool", "search: TimeoutError", "w7", 3.0, 1998)]
    text = shown(status)
    assert len(text.splitlines()) < 60
    assert "2,000 workers: 1,500 in tools, 500 left" in text
    assert "now waiting  1,998 workers for a ticket, up to 12.0 s" in text
    assert "tool at w7 and 1,997 others: search: TimeoutError" in text
    assert "workers: " not in shown(a_status())


def test_i7_workers_that_were_refused_for_lack_of_room_are_counted() -> None:
    status = a_status()
    assert "busy" not in shown(status)
    status.connections = ConnectionStatus(max_workers=2048, refused=1312, refused_since_s=250.0, refused_s_ago=3.0)
    line = "busy: 1,312 requests of workers were refused, the first 4 min ago, the newest 3 s ago: the queue"
    assert line in shown(status, width=200)


def a_status_of_a_bad_day() -> Status:
    status = a_status()
    status.notices = [
        Notice(
            number, "reward", "accuracy: ValueError: 1 reward for 2 completions in examples/multiply/task.py:41", "w", s
        )
        for number, s in ((1, 7300.0), (2, 130.0), (3, 12.0))
    ]
    status.stall = Stall(True, 130.0, "no vLLM server is serving: vllm-1 is down (connection refused); restart it")
    what = "an answer that the run can use, or a restart: down (connection refused by 127.0.0.1:8101)"
    status.waits.append(Wait("server vllm-1", what, 42.0))
    return status


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("status", [a_status(), a_status_of_a_bad_day()])
def test_no_line_is_wider_than_the_terminal_and_no_row_is_broken(status: Status, width: int) -> None:
    lines = shown(status, width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("gpu-node-17" in line for line in lines) == 1
    assert sum("vllm-0" in line for line in lines) == 1


@pytest.mark.parametrize("width", [80, 100])
def test_i7_notices_stand_above_the_figures(width: int) -> None:
    lines = shown(a_status_of_a_bad_day(), width).splitlines()
    notices = [number for number, line in enumerate(lines) if line.startswith("! ")]
    assert [lines[number].split("reward")[0].strip() for number in notices] == [
        "! 2 h ago",
        "! 2 min ago",
        "! 12 s ago",
    ]
    assert notices[-1] < next(number for number, line in enumerate(lines) if line.startswith("groups"))


def test_a_run_that_was_given_up_says_so_in_place_of_the_alarm() -> None:
    status = a_status_of_a_bad_day()
    status.gave_up = "the first 16 groups failed, all for failed:reward: boom"
    assert shown(status).splitlines()[1].startswith("GAVE UP: the first 16 groups failed")
    assert "STALLED" not in shown(status)


def test_texts_of_others_are_no_markup() -> None:
    status = a_status_of_a_bad_day()
    status.notices[0].text = status.servers[1].reason = status.waits[0].what = "[/bold] list[int]"
    status.workers[0].worker_id = "[/w]"
    assert shown(status).count("[/bold] list[int]") == 3


def test_a_terminal_is_told_nothing_by_the_names_and_reasons_of_others() -> None:
    status = a_status_of_a_bad_day()
    escape = "\x1b]0;owned\x07\x9b2J"
    status.workers[0].worker_id = status.servers[0].name = status.servers[1].reason = "name" + escape
    status.notices[0].who = status.notices[0].text = status.waits[0].who = status.stall.why = "who" + escape
    status.drops = status.rejections = {"why" + escape: 1}
    text = shown(status)
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert "name\ufffd]0;owned" in text


def test_the_status_of_another_run_is_not_taken_for_this_one_s() -> None:
    now = status(run="other")
    assert of_run(now, "other", "http://q:8200") is now
    with pytest.raises(ConfigError, match="the queue at http://q:8200 serves run other, not mine"):
        of_run(now, "mine", "http://q:8200")
