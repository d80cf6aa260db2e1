"""What the status says of workers, and who may have a request on a server that drains."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.protocol.messages import WorkerReport
from slipstream.protocol.status import WorkerStatus
from slipstream.rollout_queue.observe.workers import WorkerReports


def statuses(workers: WorkerReports, now: float, **waits: str) -> list[WorkerStatus]:
    return workers.statuses(now, waits.get)


def test_a_worker_that_says_no_more_has_no_open_episodes() -> None:
    """It was stopped; the tickets of its episodes are others' by then."""
    workers = WorkerReports(8)
    counts = {"episodes_in_flight": 9, "episodes_generating": 7, "waiting_for_servers": 2}
    workers.report(WorkerReport("w0", [], episodes_done=3, **counts), now=10.0)
    for now, expected, does in (
        (34.9, counts, "generating"),
        (35.0, counts, "quiet"),
        (70.0, counts, "quiet"),
        (70.1, dict.fromkeys(counts, 0), "silent"),
    ):
        (status,) = statuses(workers, now)
        assert {name: getattr(status, name) for name in counts} == expected
        assert (status.episodes_done, status.seen_s_ago, status.does) == (3, now - 10.0, does)


@pytest.mark.parametrize(
    ("does", "waits_for", "counts"),
    [
        ("idle", None, {}),
        ("waiting_for_tickets", "the depth limit", {}),
        ("waiting_for_session", "the learner's session", {}),
        ("generating", "the depth limit", {"episodes_in_flight": 9, "episodes_generating": 5, "episodes_in_tools": 4}),
        ("in_tools", None, {"episodes_in_flight": 9, "episodes_generating": 4, "episodes_in_tools": 5}),
        ("in_judgement", None, {"episodes_in_flight": 9, "episodes_in_judgement": 1}),
        ("waiting", None, {"episodes_in_flight": 9, "episodes_waiting": 5, "episodes_generating": 4}),
        (
            "waiting_for_servers",
            None,
            {"episodes_in_flight": 9, "episodes_generating": 5, "waiting_for_servers": 5},
        ),
    ],
)
def test_a_worker_does_what_most_of_its_episodes_do(does: str, waits_for: str | None, counts: dict[str, Any]) -> None:
    workers = WorkerReports(8)
    workers.report(WorkerReport("w", [], **counts), now=0.0)
    (status,) = workers.statuses(1.0, lambda _: waits_for)
    assert status.does == does
    workers.leave("w")
    (status,) = workers.statuses(1.0, lambda _: waits_for)
    assert status.does == "left"


def test_a_poll_that_ends_after_its_worker_has_left_does_not_bring_it_back() -> None:
    workers = WorkerReports(8)
    for name in ("w", "v"):
        workers.report(WorkerReport(name, []), now=0.0)
    workers.leave("w")
    workers.seen("w", now=1.0)
    assert {status.worker_id: status.does for status in statuses(workers, 1.0)} == {"w": "left", "v": "idle"}
    assert workers.count_on_server("a", 1.0) == 1
    workers.report(WorkerReport("w", []), now=2.0)
    assert workers.count_on_server("a", 2.0) == 2


def test_the_longest_silent_are_forgotten_where_there_are_too_many_and_all_after_an_hour() -> None:
    workers = WorkerReports(2)
    for now, name in enumerate("abac"):
        workers.report(WorkerReport(name, []), float(now))
    assert [status.worker_id for status in statuses(workers, 3.0)] == ["a", "c"]
    assert workers.count_on_server("s", 3.0) == 2
    workers.seen("a", 3602.0)
    assert [status.worker_id for status in statuses(workers, 3602.0)] == ["c", "a"]
    workers.seen("a", 3603.0)
    assert [status.worker_id for status in statuses(workers, 3603.0)] == ["a"]


def test_who_may_have_a_request_on_a_server_that_drains() -> None:
    workers = WorkerReports(100)
    for number in range(20):
        workers.report(WorkerReport(f"w{number:02}", [], draining={"s": 1}), now=0.0)
    workers.report(WorkerReport("idle", [], draining={"s": 0, "t": 0}), now=0.0)
    assert (workers.count_on_server("s", 1.0), workers.count_on_server("t", 1.0)) == (20, 20)
    assert workers.on_server("s", 1.0, limit=2) == ["w00", "w01"]
    for number in range(18):
        workers.report(WorkerReport(f"w{number:02}", [], draining={"s": 0}), now=30.0)
    workers.seen("w00", now=40.0)
    assert workers.on_server("s", 50.0, limit=8) == ["w18", "w19"]
    workers.leave("w18")
    assert workers.on_server("s", 50.0, limit=8) == ["w19"]
    assert workers.count_on_server("s", 61.0) == 0, "w19 is silent"
    workers.report(WorkerReport("w00", [], draining={"s": 2}), now=62.0)
    assert workers.on_server("s", 62.0, limit=8) == ["w00"]
    assert workers.on_server("s", 200.0, limit=8) == []
    assert not workers._done, "nobody is heard from"
