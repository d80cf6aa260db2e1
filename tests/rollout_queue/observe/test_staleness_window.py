"""Ages of trained groups, and rates and waits of the status page."""

from __future__ import annotations

import pytest

from protocol.messages import WorkerReport
from rollout_queue.ledger.records import GroupFacts, TicketRecord, TicketState
from rollout_queue.observe.observations import Observations
from rollout_queue.observe.windows import WINDOW_STEPS, RateMeter, StalenessWindow, Waits, age_of


def trained(oldest: int, arrival: int, version: int) -> TicketRecord:
    issued = TicketRecord(index=0, attempt=0, serial=0, worker_id="w", version=oldest)
    facts = GroupFacts(bytes=1, tokens=1, oldest_version=oldest)
    arrived = issued.to(TicketState.READY, arrival_version=arrival, group=facts)
    return arrived.to(TicketState.TRAINED, trained_version=version)


def test_age_splits_at_arrival() -> None:
    """Sampled at 3, arrived at 5, trained on version 9 (making 10)."""
    age = age_of(trained(oldest=3, arrival=5, version=10))
    assert (age.in_flight, age.in_queue, age.total) == (2, 4, 6)


def test_a_group_trained_on_the_version_that_sampled_it_has_age_0() -> None:
    assert age_of(trained(oldest=7, arrival=7, version=8)).total == 0


def test_figures_cover_the_newest_steps_and_the_whole_run() -> None:
    window = StalenessWindow()
    assert window.add_step([trained(0, 0, 9)], reported_max=None) == 8
    for _ in range(WINDOW_STEPS):
        window.add_step([trained(4, 5, 6), trained(5, 5, 6)], reported_max=None)
    figures = window.summary(max_ever=8)
    assert (figures.max, figures.max_ever) == (1, 8)
    assert figures.mean == pytest.approx(figures.in_flight_mean + figures.in_queue_mean) == 0.5


def test_the_learners_figure_counts_where_it_masked_older_tokens() -> None:
    window = StalenessWindow()
    assert window.add_step([trained(0, 0, 6)], reported_max=4) == 5
    assert window.summary(max_ever=4).max_ever == 4


def test_rates_cover_the_last_minute() -> None:
    meter = RateMeter(now=0.0)
    meter.add(10.0, groups=30, tokens_sampled=600)
    meter.add(100.0, groups=60)
    rates = meter.rates(100.0)
    assert rates.groups == 1.0
    assert rates.tokens_sampled == 0.0


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
    assert (seen.waiting_for_servers(16.0), seen.waiting_for_servers(300.0)) == (30, 0)
    assert [status.waiting_for_servers for status in seen.workers(16.0)] == [30]
    seen.worker_reports(WorkerReport("w0", []), now=17.0)
    assert [wait.who for wait in seen.waits.list(17.0)] == ["w0"]
    assert seen.waiting_for_servers(17.0) == 0


def test_a_worker_that_says_no_more_has_no_open_episodes() -> None:
    """It was stopped; the tickets of its episodes are others' by then."""
    seen = Observations(0.0, groups_per_step=4, start_s=60.0, max_workers=8)
    seen.worker_reports(WorkerReport("w0", [], episodes_in_flight=9, episodes_generating=7, episodes_done=3), now=10.0)
    (heard,), (gone,) = seen.workers(20.0), seen.workers(90.0)
    assert (heard.episodes_in_flight, heard.episodes_generating, heard.episodes_done) == (9, 7, 3)
    assert (gone.episodes_in_flight, gone.episodes_generating, gone.episodes_done) == (0, 0, 3)
