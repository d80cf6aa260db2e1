"""The history of a run: its columns, and what is said of two looks at the status."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from protocol.history import MAX_POINTS, Columns, step_row, time_row
from protocol.messages import ServerState
from protocol.run_events import between
from protocol.status import Cause, Evaluation, LearnerStatus, Notice, ServerStatus, Stall, Status, WorkerStatus
from tests.kit.status import status


@given(st.integers(1, 5 * MAX_POINTS), st.integers(1, 3))
def test_columns_are_bounded_and_cover_everything_with_the_newest_at_their_end(count: int, gap: int) -> None:
    columns = Columns("step")
    for step in range(count):
        columns.add({"step": step * gap, "reward": float(step)})
    steps = columns.json()["step"]
    assert len(steps) <= MAX_POINTS
    assert steps[0] == 0
    assert steps[-1] == (count - 1) * gap
    assert steps == sorted(set(steps))
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps[:-1])}
    assert len(gaps) <= 1, "evenly"


def test_a_column_has_a_gap_where_a_row_lacks_it_and_a_row_of_the_same_key_replaces_the_one_before() -> None:
    columns = Columns("step")
    columns.add({"step": 1, "kl": 0.5})
    columns.add({"step": 2, "reward": 1.0})
    columns.add({"step": 2, "reward": 2.0})
    assert columns.json() == {"step": [1, 2], "kl": [0.5, None], "reward": [None, 2.0]}
    columns.forget_from(2)
    columns.add({"step": 2, "reward": 3.0})
    assert columns.json()["reward"] == [None, 3.0]


def test_rows_are_taken_from_the_status() -> None:
    workers = [worker("a", does="generating", episodes_in_flight=3), worker("b", does="left", episodes_in_flight=9)]
    now = status(step=3, workers=workers, drops={"overage": 2, "expired": 1})
    row = time_row(5.0, now)
    assert (row["at"], row["step"], row["workers"], row["workers_generating"]) == (5.0, 3, 1, 1)
    assert (row["episodes_open"], row["drops_total"], row["drop/overage"]) == (3, 3, 2)
    assert step_row(5.0, now) is None
    learner = LearnerStatus(step=3, step_s=2.0, wait_share=0.25, metrics={"reward": 0.5})
    assert step_row(6.0, msgspec.structs.replace(now, learner=learner)) == {
        "step": 3,
        "at": 6.0,
        "step_time": 2.0,
        "wait_s": 0.5,
        "reward": 0.5,
    }


def worker(name: str, **fields: Any) -> WorkerStatus:
    counts = dict.fromkeys(
        ("pid", "capacity", "episodes_done", "episodes_failed", "tokens_sampled", "tool_calls", "tool_failures"), 0
    )
    given = {"episodes_in_flight": 0, "requests_retried": 0, "wait_share": 0.0, "seen_s_ago": 1.0, **fields}
    return WorkerStatus(worker_id=name, host="h", cpu_ms_per_episode=None, **counts, **given)


def server(name: str, state: ServerState, reason: str | None = None) -> ServerStatus:
    return ServerStatus(name, f"http://{name}", state, 0, reason)


def said(before: Status | None, after: Status) -> list[tuple[str, str | None, str]]:
    return [(event.kind, event.who, event.text) for event in between(before, after, 9.0)]


def test_a_refused_worker_and_a_cause_that_is_new_are_events() -> None:
    cause = Cause("tool search", "tool search fails in 8 of its newest 8 calls", "bad")
    first = status(uptime_s=10.0, workers=[worker("a"), worker("b")])
    second = status(uptime_s=20.0, workers=[worker("a", does="refused", reason="the tokenizer differs"), worker("b")])
    third = msgspec.structs.replace(second, diagnosis=[cause])
    later = msgspec.structs.replace(cause, text="tool search fails in 9 of its newest 9 calls", since_s=1.0)
    assert said(first, second) == [("worker", "a", "worker a was refused: the tokenizer differs")]
    assert said(second, third) == [("notice", None, cause.text)]
    assert said(third, msgspec.structs.replace(third, diagnosis=[later])) == []
    assert time_row(5.0, second)["workers"] == 1


def test_what_happened_between_two_looks_is_said_once() -> None:
    first = status(
        uptime_s=10.0,
        step=4,
        servers=[server("v0", ServerState.SERVING), server("v1", ServerState.SERVING)],
        workers=[worker("a"), worker("b"), worker("c", does="silent"), worker("d")],
        learner=LearnerStatus(session=1),
        notices=[Notice(1, "tool", "old", "a", 1.0)],
    )
    assert said(first, first) == []
    second = status(
        uptime_s=20.0,
        step=5,
        checkpoint_step=5,
        servers=[server("v0", ServerState.QUARANTINED, "its proof failed"), server("v2", ServerState.JOINING)],
        workers=[worker("a", failures={"judge": 1}), worker("b", does="left"), worker("c"), worker("e")],
        learner=LearnerStatus(session=2),
        notices=[Notice(1, "tool", "old", "a", 1.0), Notice(2, "tool", "new", "e", 1.0)],
        stall=Stall(True, 120.0, "nobody samples"),
        evaluations=[Evaluation(5, 5, 1, ended="complete", reward=0.5, rows=4, done=4)],
        gave_up="nothing is accepted",
        finished=True,
    )
    assert said(first, second) == [
        ("learner", "learner", "the learner began session 2 at step 5"),
        ("learner", "learner", "a checkpoint of step 5 was saved"),
        ("run", None, "no step for 120 s: nobody samples"),
        ("run", None, "the run was given up: nothing is accepted"),
        ("run", None, "the run finished at step 5"),
        ("server", "v0", "server v0 was serving and is quarantined: its proof failed"),
        ("server", "v2", "server v2 at http://v2 joined, joining"),
        ("server", "v1", "server v1 left"),
        ("worker", "a", "worker a: the first failures of judge"),
        ("worker", "b", "worker b left"),
        ("worker", "c", "worker c came back"),
        ("worker", "e", "worker e joined from h"),
        ("worker", "d", "worker d was forgotten"),
        ("notice", "e", "new"),
        ("evaluation", None, "evaluation of step 5: reward 0.500 (4 rows, 0.0 s)"),
    ]
    assert said(second, msgspec.structs.replace(second, uptime_s=30.0)) == []


def test_a_queue_that_started_again_says_so_and_what_it_tells_anew() -> None:
    before = status(uptime_s=100.0, step=9, notices=[Notice(7, "tool", "old", None, 1.0)])
    after = status(uptime_s=1.0, step=8, notices=[Notice(1, "tool", "new", None, 1.0)])
    assert said(before, after) == [
        ("run", None, "the queue started"),
        ("run", None, "the run went back from step 9 to 8"),
        ("notice", None, "new"),
    ]
    assert said(None, status())[0] == ("run", None, "the queue started")
