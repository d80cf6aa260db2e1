"""The continuous check: a server that leaves its usual range is named, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.learner.algorithm.drift import DISTANCE, DISTANCE_TOKENS
from slipstream.learner.report.sampler_checks import IN_A_ROW, LEARNT, MIN_TOKENS, ServerWatch


def figures(tokens: int = 500, **distances: float) -> dict[str, float]:
    found = {f"{DISTANCE}{name}": distance for name, distance in distances.items()}
    return {**found, **{f"{DISTANCE_TOKENS}{name}": tokens for name in distances}, "loss": 1.0}


def learnt(**distances: float) -> ServerWatch:
    watch = ServerWatch()
    for _ in range(LEARNT):
        assert watch.step(figures(**distances)) == []
    return watch


def test_a_server_that_leaves_its_range_is_named_once() -> None:
    watch = learnt(a=0.01, b=0.012)
    alarms = [watch.step(figures(a=0.01, b=0.2)) for _ in range(IN_A_ROW + 5)]
    assert [len(texts) for texts in alarms] == [0] * (IN_A_ROW - 1) + [1] + [0] * 5
    assert alarms[IN_A_ROW - 1][0].startswith("b samples farther from the learner's policy than it did")
    assert "17 times" in alarms[IN_A_ROW - 1][0]


def test_it_is_named_again_when_it_leaves_it_again() -> None:
    watch = learnt(a=0.01)
    for distance, alarms in ((0.2, 1), (0.01, 0), (0.2, 1)):
        assert sum(len(watch.step(figures(a=distance))) for _ in range(IN_A_ROW)) == alarms
        # What was said is withdrawn, once, of a server that is back.
        assert watch.back() == (["a"] if distance == 0.01 else [])
    assert watch.back() == []


def test_one_that_was_not_named_is_not_said_to_be_back() -> None:
    watch = learnt(a=0.01)
    for distance in [0.2] * (IN_A_ROW - 1) + [0.01]:
        watch.step(figures(a=distance))
        assert watch.back() == []


@pytest.mark.parametrize("seed", range(5))
def test_rounding_is_no_alarm(seed: int) -> None:
    rng, watch = np.random.default_rng(seed), ServerWatch()
    for _ in range(500):
        spread = rng.lognormal(0.0, 0.4, 2)
        assert watch.step(figures(a=0.01 * spread[0], b=0.02 * spread[1])) == []


def test_where_all_servers_move_it_is_the_policy() -> None:
    watch = learnt(a=0.01, b=0.01)
    assert not any(watch.step(figures(a=0.3, b=0.3)) for _ in range(10))


def test_steps_of_a_few_tokens_do_not_count() -> None:
    watch = learnt(a=0.01)
    assert not any(watch.step(figures(a=5.0, tokens=MIN_TOKENS - 1)) for _ in range(10))


def test_float32_may_differ_by_many_times_nothing() -> None:
    watch = learnt(a=0.0)
    assert not any(watch.step(figures(a=3e-6)) for _ in range(10))
