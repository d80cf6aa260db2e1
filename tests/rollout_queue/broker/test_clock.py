"""Time in which the queue's process was stopped counts towards no deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.broker.clock import TICK_S, AwakeClock


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
