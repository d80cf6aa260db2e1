"""Waits end with those who wait, and many that wait for the same are one line (I7)."""

from __future__ import annotations

from slipstream.protocol.messages import WorkerReport
from slipstream.protocol.status import Wait
from slipstream.rollout_queue.observe.observations import Observations
from slipstream.rollout_queue.observe.waits import Waits, group_alike


def test_i7_a_wait_over_several_polls_keeps_its_beginning() -> None:
    waits = Waits()
    waits.begin("w", "a server", now=10.0, until=100.0)
    waits.begin("w", "the depth limit", now=40.0, until=130.0)
    assert [(w.what, w.since_s) for w in waits.list(50.0)] == [("the depth limit", 40.0)]


def test_i7_the_wait_of_a_worker_that_went_away_is_forgotten() -> None:
    waits = Waits()
    waits.begin("w", "a ticket", now=10.0, until=100.0)
    waits.begin("learner", "groups", now=10.0)
    assert [w.who for w in waits.list(101.0)] == ["learner"]
    waits.end("learner")
    assert waits.list(101.0) == []


def test_waits_that_nobody_reads_are_forgotten_too() -> None:
    waits = Waits()
    for number in range(10_000):
        waits.begin(f"w{number}", "a ticket", now=float(number), until=number + 100.0)
    assert len(waits._waits) < 1000


def test_i7_episodes_that_wait_for_a_server_are_among_the_waits_beside_what_their_worker_waits_for() -> None:
    """The registry still calls the servers serving: nothing else tells that they do not answer."""
    seen = Observations(0.0, groups_per_step=4, start_s=60.0, max_workers=8)
    seen.waits.begin("w0", "the depth limit", now=10.0)
    seen.worker_reports(WorkerReport("w0", [], waiting_for_servers=32), now=10.0)
    seen.worker_reports(WorkerReport("w0", [], waiting_for_servers=30), now=15.0)
    assert [(wait.who, wait.what, wait.since_s) for wait in seen.waits.list(16.0)] == [
        ("w0", "the depth limit", 6.0),
        ("w0's episodes", "a server that answers (30 wait)", 6.0),
    ]
    seen.worker_reports(WorkerReport("w0", []), now=17.0)
    assert [wait.who for wait in seen.waits.list(17.0)] == ["w0"]


def test_i7_many_workers_that_wait_for_the_same_are_one_wait_with_the_longest() -> None:
    waits = Waits()
    waits.begin("learner", "groups", now=0.0)
    for number in range(2000):
        waits.begin(f"host-{number}", "a ticket" if number % 1000 else "the learner's session", now=float(number))
        waits.begin(f"host-{number}'s episodes", f"a server that answers ({number} wait)", now=float(number))
    assert waits.list(2000.0) == [
        Wait("learner", "groups", 2000.0),
        Wait("host-0", "the learner's session", 2000.0),
        Wait("host-1000", "the learner's session", 1000.0),
        Wait("1,998 workers", "a ticket", 1999.0, 1998),
        Wait("2,000 workers' episodes", "a server that answers (0 wait)", 2000.0, 2000),
    ]


def test_a_few_that_wait_for_the_same_are_named() -> None:
    few = [Wait(f"server {number}", "newer weights: stale", float(number)) for number in range(4)]
    assert group_alike(few, "servers") == few
    more = [*few, Wait("server 4", "newer weights: stale", 4.0)]
    assert group_alike(more, "servers") == [Wait("5 servers", "newer weights: stale", 4.0, 5)]
