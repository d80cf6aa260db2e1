from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm import advantages
from slipstream.learner.algorithm.step_data import NORMALISERS, StepRollouts
from slipstream.protocol.config import LearnerSection

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def group(rewards: list[float]) -> StepRollouts:
    """A step of one group."""
    size = len(rewards)
    return StepRollouts.of(np.array(rewards, dtype=np.float64), np.zeros(size, dtype=np.int64), np.full(size, 3))


@settings(deadline=None)
@given(REWARDS)
def test_grpo_is_trl_s_with_the_sample_standard_deviation(rewards: list[float]) -> None:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-4)
    actual = advantages.build(LearnerSection(advantage="grpo", advantage_epsilon=1e-4))(group(rewards))
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    """Worked by hand: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2."""
    rloo = advantages.build(LearnerSection(advantage="rloo"))
    assert rloo(group([1.0, 2.0, 6.0])).tolist() == [-3.0, -1.5, 4.5]


def test_async_grpo_takes_the_population_s_deviation() -> None:
    """Worked by hand: mean 3, squares 4 + 1 + 9 over 3, the square root of which is 2.1602."""
    async_grpo = advantages.build(LearnerSection(advantage="async_grpo"))
    np.testing.assert_allclose(async_grpo(group([1.0, 2.0, 6.0])), [-0.92582, -0.46291, 1.38873], rtol=1e-5)


def test_batch_takes_the_deviation_of_the_whole_step() -> None:
    """Worked by hand: the rewards 0, 2, 0, 6 have mean 2, squares 4 + 0 + 4 + 16 over 3, deviation 2.8284."""
    step = StepRollouts.of(np.array([0.0, 2.0, 0.0, 6.0]), np.array([0, 0, 1, 1]), np.full(4, 3))
    batch = advantages.build(LearnerSection(advantage="batch", advantage_epsilon=1e-9))
    np.testing.assert_allclose(batch(step), np.array([-1, 1, -3, 3]) / 8**0.5, rtol=1e-6)


def components(*columns: list[float], weights: list[float] | None = None) -> StepRollouts:
    """One group of these components; its rewards are their weighted sums."""
    values = np.array(columns).T
    of = np.ones(len(columns)) if weights is None else np.array(weights)
    size = len(values)
    return StepRollouts(np.nansum(values * of, axis=1), np.zeros(size, dtype=np.int64), np.full(size, 3), values, of)


def gdpo() -> advantages.Advantage:
    return advantages.build(LearnerSection(advantage="gdpo", advantage_epsilon=1e-9))


def test_gdpo_gives_each_reward_function_its_own_deviation() -> None:
    """Worked by hand: both columns are (-1, -1, 2) / sqrt(3) in some order, whatever their scale; the sum
    (1, -2, 1) / sqrt(3), deviation 1, stays as it is. GRPO sees the second alone."""
    step = components([0.0, 0.0, 0.003], [1000.0, 0.0, 0.0])
    np.testing.assert_allclose(gdpo()(step), np.array([1, -2, 1]) / 3**0.5, rtol=1e-5)


def test_gdpo_weighs_after_it_normalises_and_a_none_adds_nothing() -> None:
    """Worked by hand: the second function scored two, which are (-1, 1) / sqrt(2); of the first, (-1, 0, 1), times 2.
    Sums -2 - 0.7071, 0.7071, 2; mean 0, deviation 2.4319."""
    step = components([0.0, 1.0, 2.0], [5.0, 9.0, float("nan")], weights=[2.0, 1.0])
    np.testing.assert_allclose(gdpo()(step), np.array([-2.70711, 0.70711, 2.0]) / 2.43192, rtol=1e-4)


NAN = float("nan")


@pytest.mark.parametrize(
    ("columns", "weights", "flat"),
    [
        ([[0.0, 1.0], [1.0, 0.0]], [1.0, 1.0], False),
        ([[1.0, 1.0], [3.0, 3.0]], [1.0, 1.0], True),
        ([[1.0, 1.0], [3.0, 4.0]], [1.0, 0.0], True),
        ([[1.0, 1.0], [3.0, NAN]], [1.0, 1.0], True),
        ([[1.0, 1.0, NAN], [3.0, NAN, 4.0]], [1.0, 1.0], False),
        ([[0.1 + 0.2, 0.3], [1e6 / 3, 1e6 - 2e6 / 3]], [1.0, 1.0], True),
        ([[1e-9, 2e-9], [1.0, 1.0]], [1.0, 1.0], False),
    ],
)
def test_a_group_is_flat_for_gdpo_only_if_every_reward_function_is(
    columns: list[list[float]], weights: list[float], flat: bool
) -> None:
    """0 + 1 and 1 + 0 are the same reward, and no reason to drop the group; one number alone says nothing."""
    step = components(*columns, weights=weights)
    assert gdpo().is_flat(step) is flat
    assert not (flat and gdpo()(step).any())


def test_a_rollout_that_no_function_scored_has_advantage_0_and_no_part_in_the_mean() -> None:
    values = gdpo()(components([0.0, 2.0, NAN, 1.0]))
    np.testing.assert_allclose(values, [-1, 1, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokens", [1 / 8, 1 / 8, 1 / 8]),
        ("sequences", [1 / (6 * 3), 1 / (2 * 3), None]),
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
        ("rollouts", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_a_normaliser_by_hand(name: str, expected: list[float | None]) -> None:
    """Rollouts of 6 and 2 tokens that train, and of none, whose weight meets no token; 10 is the longest."""
    step = StepRollouts.of(np.zeros(3), np.zeros(3, dtype=np.int64), np.array([6, 2, 0]))
    weights = NORMALISERS[name](step, 10)
    assert np.isfinite(weights).all()
    for weight, wanted in zip(weights, expected, strict=True):
        assert wanted is None or weight == pytest.approx(wanted)


def test_dr_grpo_is_the_distance_from_the_mean() -> None:
    dr_grpo = advantages.build(LearnerSection(advantage="dr_grpo"))
    assert dr_grpo(group([1.0, 2.0, 6.0])).tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("name", ["grpo", "async_grpo", "dr_grpo", "rloo", "batch"])
@pytest.mark.parametrize(
    "rewards",
    [[0.1 + 0.2, 0.3, 0.6 - 0.3], [float(np.float32(0.1) + np.float32(0.2)), 0.3]],
    ids=["sums", "of float32"],
)
def test_rewards_that_are_equal_up_to_rounding_give_no_gradient(name: str, rewards: list[float]) -> None:
    section = LearnerSection.model_validate({"advantage": name})
    assert not advantages.build(section)(group(rewards)).any()
    assert advantages.build(section)(group([*rewards, rewards[0] + 1e-5])).any()
