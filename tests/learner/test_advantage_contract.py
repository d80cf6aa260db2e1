"""What every advantage must keep, whatever its formula."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm import advantages
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.advantages.base import Advantage
from learner.algorithm.rollouts import StepRollouts
from protocol.config import LearnerSection


def group(rewards: np.ndarray) -> StepRollouts:
    """A step of one group."""
    return StepRollouts.of(rewards, np.zeros(len(rewards), dtype=np.int64), np.full(len(rewards), 3))


WILD_REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16).map(np.array)
# Apart by more than the rounding of their mean.
REWARDS = st.lists(st.integers(-1000, 1000), min_size=1, max_size=16).map(lambda values: np.array(values) / 100)


@pytest.fixture(scope="module", params=ADVANTAGES)
def advantage(request: pytest.FixtureRequest) -> Advantage:
    return advantages.build(LearnerSection(advantage=request.param))


def test_the_run_file_offers_every_variant() -> None:
    assert set(ADVANTAGES) == set(get_args(LearnerSection.model_fields["advantage"].annotation))


@settings(deadline=None)
@given(rewards=WILD_REWARDS)
def test_one_finite_float32_a_rollout(advantage: Advantage, rewards: np.ndarray) -> None:
    before = rewards.copy()
    values = advantage(group(rewards))
    assert (values.dtype, values.shape) == (np.float32, rewards.shape)
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(rewards, before)


@settings(deadline=None)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 16))
def test_equal_rewards_and_a_lone_one_give_exactly_zero(advantage: Advantage, reward: float, size: int) -> None:
    """Rounding alone would not: 0.1 added up seven times is not 0.7."""
    assert not advantage(group(np.full(size, reward))).any()


@settings(deadline=None)
@given(rewards=WILD_REWARDS)
def test_a_better_reward_never_gets_less(advantage: Advantage, rewards: np.ndarray) -> None:
    values = advantage(group(np.sort(rewards)))
    assert (np.diff(values) >= 0).all()


@settings(deadline=None)
@given(rewards=REWARDS, random=st.randoms(use_true_random=False))
def test_the_order_of_the_rollouts_does_not_matter(advantage: Advantage, rewards: np.ndarray, random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled, straight = advantage(group(rewards[order])), advantage(group(rewards))[order]
    np.testing.assert_allclose(shuffled, straight, rtol=1e-4, atol=1e-6 * float(np.abs(straight).max()))


def test_rewards_that_differ_give_a_gradient(advantage: Advantage) -> None:
    values = advantage(group(np.array([0.0, 0.0, 1.0])))
    assert values[2] > 0 > values[0]
