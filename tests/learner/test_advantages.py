from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithm import advantages
from learner.algorithm.rollouts import StepRollouts
from protocol.config import LearnerSection

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


def test_dr_grpo_is_the_distance_from_the_mean() -> None:
    dr_grpo = advantages.build(LearnerSection(advantage="dr_grpo"))
    assert dr_grpo(group([1.0, 2.0, 6.0])).tolist() == [-2.0, -1.0, 3.0]
