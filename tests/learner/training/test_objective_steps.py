"""Objectives in a whole step: rollouts whose segments stand in several rows, and one token gone wild."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.learner.algorithm.objectives import OBJECTIVES
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.packing import PackedRow, Sample, SampledFrom, pack, pack_row
from slipstream.learner.model.policy import Policy
from slipstream.learner.training.base import StepMetrics
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import gradients, sample, step_rollouts
from tests.kit.messages import VOCABULARY

NORMALISERS = {"gspo": "sequences", "sequence_clip": "rollouts"}


def segments() -> list[Sample]:
    """Four rollouts, three of which have two segments or three, of the lengths that they would have after a rewrite."""
    of = [(0, 17), (0, 9), (1, 12), (2, 8), (2, 15), (2, 6), (3, 11), (3, 14)]
    return [sample(length, length // 3, seed, rollout) for seed, (rollout, length) in enumerate(of)]


def step(policy: Policy, rows: list[PackedRow], rollouts: StepRollouts, **settings: Any) -> StepMetrics:
    """One step whose gradients stay in the policy, unclipped."""
    trainer = PolicyTrainer(policy, LearnerSection(max_grad_norm=1e9, **settings), longest=64)
    trainer.optimiser.zero_grad = lambda: None
    return trainer.step(rows, rollouts)


def near(policy: Policy, samples: list[Sample]) -> list[Sample]:
    """The samples as if an older policy had sampled them: log-probs up to about 0.1 away, so that clips divide them."""
    random = np.random.default_rng(0)
    moved = []
    for item in samples:
        scores = np.concatenate([[0.0], policy.score(item.token_ids.tolist())])
        behaviour = np.where(item.weights > 0, scores + random.normal(0.01, 0.1, len(item)), 0.0)
        moved.append(replace(item, behaviour=behaviour.astype(np.float32)))
    return moved


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_does_not_depend_on_how_rollouts_of_several_segments_are_packed(
    make_policy: Callable[..., Policy], name: str
) -> None:
    samples = near(make_policy(), segments())
    rollouts = step_rollouts(samples)
    settings = {"objective": name, "normaliser": NORMALISERS.get(name, "tokens"), "clip_high": 0.1, "clip_low": 0.05}
    found = []
    for budget in (200, 40, 17):
        policy = make_policy()
        rows = pack(samples, budget)
        stands_in = [set(row.rollout.tolist()) for row in rows]
        assert (len(rows) > 1) == (budget < 200)
        assert (sum(map(len, stands_in)) > 4) == (budget < 200), "or no rollout is split"
        metrics = step(policy, rows, rollouts, **settings)
        found.append((metrics, gradients(policy)))
    (whole, expected), *others = found
    assert whole.grad_norm > 0.01
    # The ratio of a whole rollout adds up its log-probs' rounding, about 1e-6 here.
    for metrics, actual in others:
        assert metrics.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-6)
        assert metrics.objective == pytest.approx(whole.objective, rel=1e-5, abs=1e-6)
        for key, gradient in actual.items():
            torch.testing.assert_close(gradient, expected[key], atol=2e-6, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


def norms(
    make_policy: Callable[..., Policy], advantage: float, log_ratios: list[float], **settings: Any
) -> list[float]:
    """The norms of the gradient with one token at each of the log-ratios, the others at 0."""
    policy = make_policy()
    samples = [sample(20, 5, seed, rollout=seed) for seed in range(4)]
    exact = [np.concatenate([[0.0], policy.score(item.token_ids.tolist())]).astype(np.float32) for item in samples]
    rewards = np.array([-advantage, advantage, 1.0, -1.0])
    counts = np.array([np.count_nonzero(item.weights) for item in samples])
    rollouts = StepRollouts.of(rewards, np.array([0, 0, 1, 1]), counts)
    wild = int(np.flatnonzero(samples[1].weights)[-1])
    found = []
    for log_ratio in log_ratios:
        behaviour = [values.copy() for values in exact]
        behaviour[1][wild] -= log_ratio
        moved = [replace(item, behaviour=values) for item, values in zip(samples, behaviour, strict=True)]
        found.append(step(make_policy(), pack(moved, 200), rollouts, **settings).grad_norm)
    return found


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_by_default_one_wild_token_cannot_take_over_a_step(
    make_policy: Callable[..., Policy], advantage: float
) -> None:
    """Without delta a bad one at 18 does."""
    log_ratios = [-18.0, -5.0, -1.0, 0.0, 1.0, 1.38, 5.0, 18.0]
    found = norms(make_policy, advantage, log_ratios)
    calm = found[log_ratios.index(0.0)]
    assert max(found) < 2 * calm
    (wild,) = norms(make_policy, advantage, [18.0], delta="none")
    assert wild > 10_000 * calm if advantage < 0 else wild < 2 * calm
    assert all(map(math.isfinite, [*found, wild]))


def masked(samples: list[Sample]) -> list[Sample]:
    """The samples as if each token had been sampled from three ids."""
    random = np.random.default_rng(1)
    changed = []
    for item in samples:
        counts = np.where(item.weights > 0, 3, 0)
        ids = np.stack([item.token_ids, *random.integers(0, VOCABULARY, (2, len(item)))], axis=1, dtype=np.int32)
        changed.append(replace(item, mask=SampledFrom(ids[item.weights > 0].reshape(-1), counts)))
    return changed


def test_log_probs_with_sampling_masks_do_not_depend_on_packing_and_are_over_what_could_be_sampled(
    make_policy: Callable[..., Policy], model_path: Path
) -> None:
    samples = masked(segments())
    samples[3] = replace(samples[3], mask=None)
    found = []
    for budget in (200, 17):
        policy = make_policy()
        metrics = step(policy, pack(samples, budget), step_rollouts(samples), objective="ppo_clip")
        found.append((metrics, gradients(policy)))
    (whole, expected), (parted, actual) = found
    assert parted.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parted.entropy == pytest.approx(whole.entropy, rel=1e-5)
    for key, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[key], atol=2e-6, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")

    policy = make_policy()
    one = samples[1]
    with torch.no_grad():
        logprobs = policy(pack_row([one])).logprobs
        logits = AutoModelForCausalLM.from_pretrained(model_path)(torch.from_numpy(one.token_ids).long()[None]).logits[
            0
        ]
    (trained,) = one.weights.nonzero()
    assert one.mask is not None
    for place, token in enumerate(trained):
        left, counts = one.mask.at(np.array([token]))
        assert counts.tolist() == [3]
        over = torch.logsumexp(logits[token - 1, sorted(set(left.tolist()))], 0)
        assert logprobs[place] == pytest.approx(float(logits[token - 1, one.token_ids[token]] - over), abs=1e-5)
