"""The time of a ticket, a lease or a draining server: renewals move its end, up to its greatest age."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_queue.ledger.deadlines import Deadlines

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
    assert not deadlines.is_over("a", math.nextafter(due, 0.0))
    assert deadlines.expired(due) == ["a"]
    assert deadlines.is_over("a", due)
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
    assert not deadlines.is_over("a", 1e9)
    assert (len(deadlines), list(deadlines)) == (0, [])
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


@given(
    st.lists(st.tuples(st.sampled_from(["start", "renew", "end"]), st.sampled_from("abcdef"), st.floats(0, 9))),
    st.integers(1, 5),
)
def test_nothing_is_out_for_longer_than_it_may_be(events: list[tuple[str, str, float]], look_every: int) -> None:
    """Next to a plain account of when each started and was last heard from."""
    deadlines, now = Deadlines(TIMEOUT_S, MAX_AGE_S), 0.0
    account: dict[str, tuple[float, float]] = {}
    for number, (what, name, seconds) in enumerate(events):
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
        if number % look_every:
            continue
        due = {name: min(started + MAX_AGE_S, heard + TIMEOUT_S) for name, (started, heard) in account.items()}
        for _ in range(2):  # a look changes nothing
            assert deadlines.expired(now) == [name for name, at in due.items() if at <= now], "in the order of starts"
            assert deadlines.soonest() == min(due.values(), default=math.inf)
        assert {name for name in account if deadlines.is_over(name, now)} == {n for n, at in due.items() if at <= now}
        outlived = {name for name in account if deadlines.has_outlived(name, now)}
        assert outlived == {name for name, (started, _) in account.items() if started + MAX_AGE_S <= now}
        assert list(deadlines) == list(account)


def test_a_clock_that_goes_back_brings_a_deadline_forward() -> None:
    deadlines = Deadlines(TIMEOUT_S)
    deadlines.start("a", 100.0)
    deadlines.renew("a", 50.0)
    assert deadlines.soonest() == 60.0
    assert deadlines.expired(60.0) == ["a"]


def test_what_has_ended_takes_no_memory() -> None:
    """A week's tickets come and go within one time-out."""
    deadlines = Deadlines(1e9)
    tracemalloc.start()
    for number in range(20_000):
        deadlines.start(str(number), float(number))
        if number >= 10:
            deadlines.end(str(number - 10))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 100_000
