"""I2: the rule that queue and learner share."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.protocol.versions import within_staleness

versions = st.integers(0, 10**9)


@given(versions, versions, st.integers(0, 10_000))
def test_i2_a_token_trains_until_it_is_older_than_the_bound(version: int, oldest: int, bound: int) -> None:
    assert within_staleness(version, oldest, bound) == (version - oldest <= bound)
    assert within_staleness(oldest + bound, oldest, bound)
    assert not within_staleness(oldest + bound + 1, oldest, bound)


def test_i2_of_an_array_each_token_is_judged() -> None:
    assert within_staleness(7, np.array([2, 3, 7]), 4).tolist() == [False, True, True]
