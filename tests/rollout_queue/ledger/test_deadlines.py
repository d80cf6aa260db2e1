"""A ticket's or a lease's time: renewals move its end, up to its greatest age."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.ledger.ledger import Deadlines

TIMEOUT_S, MAX_AGE_S = 10.0, 25.0


@pytest.mark.parametrize(
    ("renewed", "due"),
    [([], 10.0), ([4.0], 14.0), ([4.0, 12.0], 22.0), ([9.0, 18.0], 25.0), ([9.0, 18.0, 24.0], 25.0)],
)
def test_a_renewal_gives_the_whole_time_again_but_no_more_than_the_greatest_age(
    renewed: list[float], due: float
) -> None:
    deadlines = Deadlines(TIMEOUT_S, MAX_AGE_S)
    deadlines.start("a", 0.0)
    for now in renewed:
        deadlines.renew("a", now)
    assert deadlines.soonest() == due
    assert deadlines.expired(math.nextafter(due, 0.0)) == []
    assert deadlines.expired(due) == ["a"]
    assert deadlines.has_outlived("a", due) == (due == MAX_AGE_S)


def test_without_a_greatest_age_it_may_be_renewed_for_ever() -> None:
    deadlines = Deadlines(TIMEOUT_S)
    deadlines.start("a", 0.0)
    for now in range(0, 1000, 10):
        deadlines.renew("a", float(now))
    assert deadlines.soonest() == 1000.0
    assert not deadlines.has_outlived("a", 1e9)


def test_a_greatest_age_below_the_time_out_is_the_first_to_end_it() -> None:
    deadlines = Deadlines(TIMEOUT_S, 3.0)
    deadlines.start("a", 5.0)
    assert deadlines.soonest() == 8.0


def test_what_is_not_out_has_no_deadline() -> None:
    deadlines = Deadlines(TIMEOUT_S, MAX_AGE_S)
    deadlines.renew("never", 0.0)
    deadlines.start("a", 0.0)
    deadlines.end("a")
    deadlines.end("a")
    deadlines.renew("a", 1.0)
    assert deadlines.expired(1e9) == []
    assert deadlines.soonest() == math.inf
    with pytest.raises(KeyError):
        deadlines.has_outlived("a", 0.0)


def test_one_that_starts_again_begins_anew() -> None:
    deadlines = Deadlines(TIMEOUT_S, MAX_AGE_S)
    deadlines.start("a", 0.0)
    deadlines.start("b", 1.0)
    deadlines.start("a", 20.0)
    assert deadlines.expired(30.0) == ["a", "b"]
    assert not deadlines.has_outlived("a", 44.0)
    assert deadlines.has_outlived("a", 45.0)


@given(st.lists(st.tuples(st.sampled_from(["start", "renew", "end"]), st.sampled_from("abc"), st.floats(0, 15))))
def test_nothing_is_out_for_longer_than_it_may_be(events: list[tuple[str, str, float]]) -> None:
    """Beside a plain account of when each started and was last heard from."""
    deadlines, now = Deadlines(TIMEOUT_S, MAX_AGE_S), 0.0
    account: dict[str, tuple[float, float]] = {}
    for what, name, seconds in events:
        now += seconds
        if what == "start":
            deadlines.start(name, now)
            account[name] = (now, now)
        elif what == "renew":
            deadlines.renew(name, now)
            if name in account:
                account[name] = (account[name][0], now)
        else:
            deadlines.end(name)
            account.pop(name, None)
        due = {name: min(started + MAX_AGE_S, heard + TIMEOUT_S) for name, (started, heard) in account.items()}
        assert set(deadlines.expired(now)) == {name for name, at in due.items() if at <= now}
        assert deadlines.soonest() == min(due.values(), default=math.inf)
        outlived = {name for name in account if deadlines.has_outlived(name, now)}
        assert outlived == {name for name, (started, _) in account.items() if started + MAX_AGE_S <= now}
