"""What every advantage must keep, whatever its formula."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm import advantages
from slipstream.learner.algorithm.advantages import ADVANTAGES, Advantage
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.protocol.config import LearnerSection


def group(rewards: np.ndarray) -> StepRollouts:
    """A step of one group."""
    return StepRollouts.of(rewards, np.zeros(len(rewards), dtype=np.int64), np.full(len(rewards), 3))


# Those that grow with the rewards; of the others a scale divides out.
GROW = ("dr_grpo", "rloo")
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


STEPS = st.lists(st.lists(st.integers(-1000, 1000), min_size=2, max_size=8), min_size=1, max_size=5)


def step(groups: list[list[int]], scale: float = 1.0, shift: float = 0.0) -> StepRollouts:
    """Groups of different sizes: one may have lost rollouts, and two are left at least."""
    rewards = np.array([reward for rewards in groups for reward in rewards]) / 100 * scale + shift
    numbers = np.repeat(np.arange(len(groups)), [len(rewards) for rewards in groups])
    return StepRollouts.of(rewards, numbers, np.full(len(rewards), 3))


@settings(deadline=None)
@given(groups=STEPS)
def test_the_advantages_of_a_group_sum_to_zero(advantage: Advantage, groups: list[list[int]]) -> None:
    rollouts = step(groups)
    values = advantage(rollouts)
    for members in rollouts.by_group():
        assert abs(float(values[members].sum(dtype=np.float64))) <= 1e-5 * max(1.0, float(np.abs(values).max()))


@settings(deadline=None)
@given(groups=STEPS, shift=st.integers(-50, 50))
def test_a_shift_of_all_rewards_does_not_matter(advantage: Advantage, groups: list[list[int]], shift: int) -> None:
    """Its own shift for each group would not matter either; here all groups share one."""
    straight, shifted = advantage(step(groups)), advantage(step(groups, shift=float(shift)))
    np.testing.assert_allclose(shifted, straight, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(straight).max())))


@settings(deadline=None)
@given(groups=STEPS, scale=st.sampled_from([0.5, 3.0, 100.0]))
def test_a_scale_of_all_rewards_divides_out_or_stays(
    advantage: Advantage, groups: list[list[int]], scale: float
) -> None:
    """Up to the epsilon next to the deviation, which is 1e-8 here."""
    kind = advantage.section.advantage
    exact = advantages.build(LearnerSection(advantage=kind, advantage_epsilon=1e-8))
    straight, scaled = exact(step(groups)), exact(step(groups, scale))
    expected = straight * (scale if kind in GROW else 1.0)
    np.testing.assert_allclose(scaled, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


@settings(deadline=None)
@given(groups=STEPS, random=st.randoms(use_true_random=False))
def test_the_order_of_the_groups_does_not_matter(advantage: Advantage, groups: list[list[int]], random: object) -> None:
    """Nor, with it, in which row or micro-batch a rollout stands."""
    order = list(range(len(groups)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rollouts = step(groups)
    straight = advantage(rollouts)
    expected = np.concatenate([straight[rollouts.groups == number] for number in order])
    shuffled = advantage(step([groups[number] for number in order]))
    np.testing.assert_allclose(shuffled, expected, rtol=1e-4, atol=1e-6 * max(1.0, float(np.abs(expected).max())))


@settings(deadline=None)
@given(groups=STEPS)
def test_normalised_advantages_have_mean_0_and_deviation_1(advantage: Advantage, groups: list[list[int]]) -> None:
    """Where any rewards differ in a group; else all are 0."""
    section = LearnerSection(advantage=advantage.section.advantage, normalise_advantages=True, advantage_epsilon=1e-8)
    values = advantages.build(section)(step(groups)).astype(np.float64)
    if not any(np.ptp(rewards) for rewards in groups):
        assert not values.any()
        return
    assert float(values.mean()) == pytest.approx(0, abs=1e-4)
    assert float(values.std(ddof=1)) == pytest.approx(1, rel=1e-4)
    for members, rewards in zip(step(groups).by_group(), groups, strict=True):
        assert values[members].any() == bool(np.ptp(rewards))


def test_rewards_that_differ_give_a_gradient(advantage: Advantage) -> None:
    values = advantage(group(np.array([0.0, 0.0, 1.0])))
    assert values[2] > 0 > values[0]
