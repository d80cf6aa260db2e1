"""What all presets must keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.packing import pack
from slipstream.learner.model.logprobs import TokenScores
from slipstream.learner.training.passes import Known, Preparation
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.config.sections.presets import PRESETS
from tests.kit.learner import sample, tokens

# Two groups, of three and two rollouts, whose 2 to 5 tokens train.
STEP = StepRollouts.of(np.array([0.0, 1.0, 0.5, 1.0, 0.0]), np.array([0, 0, 0, 1, 1]), np.array([3, 2, 5, 4, 2]))


@pytest.mark.parametrize("name", PRESETS)
def test_on_fresh_tokens_every_preset_is_the_policy_gradient(name: str) -> None:
    """Whatever it does about stale ones: each log-prob's slope is -A times its weight."""
    algorithm = Algorithm(LearnerSection(algorithm=name), longest=10)
    rollout = np.repeat(np.arange(len(STEP)), STEP.tokens)
    advantages, weights = algorithm.advantages(STEP)[rollout], algorithm.weights(STEP)[rollout]
    row = tokens(np.ones(len(rollout)), advantages, weights, rollout=torch.from_numpy(rollout))
    algorithm(row).losses.sum().backward()
    assert row.logprobs.grad is not None
    np.testing.assert_allclose(row.logprobs.grad.numpy(), -advantages * weights, rtol=1e-5, atol=1e-8)
    for members in STEP.by_group():
        assert algorithm.advantages(STEP)[members].any()


@pytest.mark.parametrize("name", [*PRESETS, "batch"])
def test_rows_give_a_rollout_s_tokens_what_is_its_own_however_they_are_cut(name: str) -> None:
    chosen = {"advantage": name} if name == "batch" else {"algorithm": name}
    algorithm = Algorithm(LearnerSection(**chosen), longest=64)
    samples = [sample(9 + 3 * number, 4, number, rollout=number % 6) for number in range(8)]
    trained = np.zeros(6, dtype=np.int64)
    for item in samples:
        trained[item.rollout] += np.count_nonzero(item.weights)
    rollouts = StepRollouts.of(np.random.default_rng(0).normal(size=6), np.arange(6) // 3, trained)
    advantages, weights = algorithm.advantages(rollouts), algorithm.weights(rollouts)
    seen = 0
    for budget in (32, 64, 512):
        rows = pack(samples, budget)
        logprobs = [torch.zeros(len(row.scored)) for row in rows]
        known = [Known(logprobs=of, entropy=of) for of in logprobs]
        preparation = Preparation(algorithm, rollouts, rows, known, torch.device("cpu"))
        for row, of in zip(rows, logprobs, strict=True):
            made = preparation.tokens(row, TokenScores(of, of), Known())
            np.testing.assert_array_equal(made.advantages, advantages[row.rollout.numpy()])
            np.testing.assert_array_equal(made.weights, weights[row.rollout.numpy()])
            seen += len(row.scored)
    assert seen == 3 * rollouts.tokens.sum()
