from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.advantages.grpo import group_advantages, has_variance

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@given(REWARDS)
def test_advantages_are_trl_s_with_the_sample_standard_deviation(rewards: list[float]) -> None:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    expected = (tensor - tensor.mean()) / (tensor.std() + 1e-4)
    actual = group_advantages(np.array(rewards), 1e-4)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)


def test_equal_rewards_give_exactly_zero() -> None:
    rewards = np.array([0.1] * 7)
    assert not has_variance(rewards)
    assert not group_advantages(rewards, 1e-4).any()


def test_a_lone_rollout_has_no_advantage() -> None:
    assert group_advantages(np.array([3.0]), 1e-4).tolist() == [0.0]
