"""Steps of the whole trainer with corrections, proximal policies and masks: nothing may depend on how rollouts are
packed, even if they stand in several rows, and nothing may cost what it need not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slipstream.learner.feed.packing import PackedRow, Sample, pack
from slipstream.learner.model.policy import Policy
from slipstream.learner.training.base import StepMetrics
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import gradients, sample, step_rollouts

# Some rollouts stay, some go.
BOUNDS = {"correction_low": 0.93, "correction_high": 1.05}
CASES: list[dict[str, Any]] = [
    {"correction": "token_truncate"},
    {"correction": "token_mask", "proximal": "interpolated", **BOUNDS},
    {"correction": "sequence_truncate", "proximal": "last_step"},
    {"correction": "sequence_mask", "proximal": "interpolated", "correction_low": 0.3},
    {"correction": "sequence_mask", "correction_low": 0.3},
    {"correction": "geometric_mask", **BOUNDS},
    {"correction": "geometric_mask", "proximal": "last_step", **BOUNDS},
    {"correction": "decoupled", "proximal": "last_step"},
    {"correction": "decoupled", "proximal": "interpolated"},
    {"off_policy_mask_threshold": 0.05},
    {"top_entropy_quantile": 0.3},
    {"correction": "decoupled", "off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.5},
]


class Step(NamedTuple):
    metrics: StepMetrics
    gradients: dict[str, torch.Tensor]
    forwards: int


@pytest.fixture(scope="module")
def samples(make_policy: Callable[..., Policy]) -> list[Sample]:
    """Six rollouts of two segments each, by a sampler that is not far from the policy."""
    policy = make_policy()
    made = []
    for seed in range(12):
        item = sample(10 + seed % 5, 3, seed, rollout=seed // 2)
        apart = np.random.default_rng(seed).normal(0.05 * (-1) ** item.rollout, 0.3, len(item) - 1)
        item.behaviour[1:] = np.minimum(policy.score(item.token_ids.tolist()) + apart, -1e-3)
        made.append(item)
    return made


def steps(policy: Policy, settings: dict[str, Any], samples: list[Sample], budgets: list[int]) -> list[Step]:
    """A step with each token budget."""
    section = LearnerSection(**{"learning_rate": 0.002, "max_grad_norm": 1e9, **settings})
    trainer = PolicyTrainer(copy.deepcopy(policy), section, longest=64)
    taken, forwards = [], 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    trainer.policy.register_forward_hook(count)
    seen: list[dict[str, torch.Tensor]] = []
    trainer.optimiser.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(trainer.policy)))
    for budget in budgets:
        before = forwards
        metrics = trainer.step(pack(samples, budget), step_rollouts(samples))
        taken.append(Step(metrics, seen[-1], forwards - before))
    return taken


@pytest.mark.parametrize("settings", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_packing_cannot_change_a_step(
    make_policy: Callable[..., Policy], samples: list[Sample], settings: dict[str, Any]
) -> None:
    policy = make_policy()
    assert len(pack(samples, 400)) == 1
    assert stands_apart(pack(samples, 24))
    # The first step is the same for both, so that both have the same policy before the second.
    one, many = (steps(policy, settings, samples, [400, budget])[1] for budget in (400, 24))
    for name, gradient in many.gradients.items():
        scale = float(one.gradients[name].abs().max())
        torch.testing.assert_close(gradient, one.gradients[name], atol=1e-4 * scale + 1e-7, rtol=1e-3, msg=name)
    for name, share in one.metrics.objective.items():
        if name.startswith(("masked/", "correction/masked")):
            assert share is not None
            assert 0 < share < 1, f"{name}: a mask of all or nothing shows little"
    assert many.metrics.loss == pytest.approx(one.metrics.loss, abs=1e-5)
    assert many.metrics.objective == pytest.approx(one.metrics.objective, rel=1e-3, abs=1e-5)


def stands_apart(rows: list[PackedRow]) -> bool:
    """Whether a rollout has tokens in several rows."""
    numbers = [number for row in rows for number in set(row.rollout.tolist())]
    return len(numbers) > len(set(numbers))


@pytest.mark.parametrize("settings", CASES[:9], ids=lambda case: "-".join(map(str, case.values())))
def test_a_correction_changes_the_gradient(
    make_policy: Callable[..., Policy], samples: list[Sample], settings: dict[str, Any]
) -> None:
    """Else the tests next to this one would say nothing."""
    policy = make_policy()
    (plain, corrected) = (steps(policy, chosen, samples, [400, 400])[1] for chosen in ({}, settings))
    name = "model.lm_head.weight"
    assert not torch.allclose(plain.gradients[name], corrected.gradients[name], rtol=1e-2)


@pytest.mark.parametrize(
    ("settings", "whole", "split"),
    [
        ({}, 1, 1),
        ({"correction": "token_truncate"}, 1, 1),
        ({"correction": "decoupled", "proximal": "interpolated"}, 1, 1),
        ({"correction": "decoupled", "proximal": "last_step"}, 2, 2),
        ({"correction": "sequence_mask"}, 1, 2),
        ({"off_policy_mask_threshold": 0.1}, 1, 2),
        ({"top_entropy_quantile": 0.5}, 1, 2),
        ({"correction": "sequence_mask", "off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.5}, 1, 2),
    ],
)
def test_a_row_is_forwarded_once_unless_the_settings_need_more(
    make_policy: Callable[..., Policy], samples: list[Sample], settings: dict[str, Any], whole: int, split: int
) -> None:
    """`whole`, `split`: forward passes of a row in the second step, with one row and with rollouts in several."""
    rows = len(pack(samples, 24))
    first, one, many = steps(make_policy(), settings, samples, [400, 400, 24])
    assert (first.forwards, one.forwards, many.forwards) == (1, whole, split * rows)


def test_last_step_is_the_policy_that_made_the_step_before(
    make_policy: Callable[..., Policy], samples: list[Sample]
) -> None:
    """The ratios of the second step are those of the weights that the first one began with; of the first step, those
    of the policy itself."""
    policy = make_policy()
    settings = {"correction": "token_truncate", "correction_high": 1e6, "proximal": "last_step"}
    (row,) = pack(samples, 400)
    with torch.no_grad():
        expected = float((policy(row).logprobs - row.behaviour).exp().mean())
    means = [
        step.metrics.objective["sampling/importance_sampling_ratio/mean"]
        for step in steps(policy, settings, samples, [400, 400, 24])
    ]
    assert means[:2] == pytest.approx([expected, expected], rel=1e-4)
    assert means[2] != pytest.approx(expected, rel=1e-4)


def test_a_rollout_s_ratio_is_that_of_the_proximal_policy(
    make_policy: Callable[..., Policy], samples: list[Sample]
) -> None:
    """Interpolated, in one row and over several: exp of the sum of (1 - 1 / d) (log policy - log sampler)."""
    policy = make_policy()
    expected = np.zeros(6)
    for item in samples:
        logprobs = np.concatenate([[0.0], policy.score(item.token_ids.tolist())])
        part = (1 - 1 / np.maximum(item.staleness, 1)) * (logprobs - item.behaviour)
        expected[item.rollout] += part[item.weights > 0].sum()
    settings = {"correction": "sequence_truncate", "correction_high": 1e6, "proximal": "interpolated"}
    for budget in (400, 24):
        (step,) = steps(policy, settings, samples, [budget])
        mean = step.metrics.objective["sampling/importance_sampling_ratio/mean"]
        assert mean == pytest.approx(np.exp(expected).mean(), rel=1e-4)


def test_what_top_entropy_keeps_is_the_share_of_the_step(
    make_policy: Callable[..., Policy], samples: list[Sample]
) -> None:
    tokens = int(step_rollouts(samples).tokens.sum())
    for step in steps(make_policy(), {"top_entropy_quantile": 0.25}, samples, [400, 24]):
        left_out = step.metrics.objective["masked/low_entropy"]
        assert left_out == pytest.approx(0.75, abs=1.5 / tokens)


def test_a_step_of_which_nothing_is_left_moves_nothing_and_is_told(
    make_policy: Callable[..., Policy], samples: list[Sample]
) -> None:
    settings = {"correction": "geometric_mask", "correction_low": 1.0, "correction_high": 1.00001}
    (step,) = steps(make_policy(), settings, samples, [24])
    assert step.metrics.objective["correction/masked"] == 1
    assert step.metrics.objective["ratio"] is None
    assert not any(gradient.any() for gradient in step.gradients.values())
