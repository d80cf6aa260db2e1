"""Ages of trained groups, and rates and waits of the status page."""

from __future__ import annotations

import pytest

from slipstream.rollout_queue.ledger.records import GroupFacts, TicketRecord, TicketState
from slipstream.rollout_queue.observe.windows import WINDOW_STEPS, RateMeter, StalenessWindow, age_of


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
    window.add_step([trained(0, 5, 8)], reported_max=4)
    figures = window.summary(max_ever=4)
    assert (figures.mean, figures.in_flight_mean, figures.in_queue_mean) == (4, 1, 3)


def test_rates_cover_the_last_minute() -> None:
    meter = RateMeter(now=0.0)
    meter.add(10.0, groups=30, tokens_sampled=600)
    meter.add(100.0, groups=60)
    rates = meter.rates(100.0)
    assert rates.groups == 1.0
    assert rates.tokens_sampled == 0.0
