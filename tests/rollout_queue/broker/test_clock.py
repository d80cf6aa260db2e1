"""Time in which the queue's process was stopped counts towards no deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout_queue.broker.clock import TICK_S, AwakeClock, Clock, WallClock


@given(st.lists(st.floats(0, 100)))
def test_it_goes_on_and_leaves_out_all_but_a_tick_of_each_long_gap(gaps: list[float]) -> None:
    time = [1000.0]
    clock = AwakeClock(lambda: time[0])
    awake = 1000.0
    for gap in gaps:
        time[0] += gap
        awake += gap if gap <= 1.0 else TICK_S
        assert clock() == pytest.approx(awake)
        assert clock() == pytest.approx(awake)
    assert clock.overslept_s == pytest.approx(time[0] - awake)


def test_the_time_of_day_goes_on_where_the_machines_clock_is_set_back() -> None:
    day, passed = [50_000.0], [7.0]
    clock = WallClock(lambda: day[0], lambda: passed[0])
    assert clock() == 50_000.0
    day[0] += 60.0
    passed[0] += 60.0
    assert clock() == 50_060.0
    day[0] -= 3 * 3600.0
    passed[0] += 1.0
    assert clock() == 50_061.0
    day[0] += 24 * 3600.0  # the machine was suspended, and its clock set right
    assert clock() == day[0]


def test_the_time_of_day_begins_behind_what_the_run_has_seen() -> None:
    clock = WallClock(lambda: 50_000.0, lambda: 7.0)
    Clock(wall=clock).not_before(40_000.0)
    assert clock() == 50_000.0
    Clock(wall=clock).not_before(90_000.0)
    assert clock() == 90_000.0


@pytest.mark.parametrize(("step", "said"), [(3600.0, "ahead by 3,600 s"), (-90.0, "back by 90 s"), (2.0, None)])
def test_a_step_of_the_machines_clock_is_described_once(step: float, said: str | None) -> None:
    day, passed = [50_000.0], [7.0]
    clock = Clock(wall=WallClock(lambda: day[0], lambda: passed[0]))
    for seconds in (1.0, 60.0):
        day[0] += seconds
        passed[0] += seconds
        assert clock.describe_step() is None
    day[0] += step
    found = clock.describe_step()
    assert found is None if said is None else found is not None and said in found
    assert clock.describe_step() is None
