"""Each objective against its paper's formula, written plainly, a rollout at a time, and differentiated by autograd.

In float64, so that rounding hides nothing. Rollouts stand in several rows here; the plain formula knows no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm import objectives
from slipstream.learner.algorithm.objectives import OBJECTIVES
from slipstream.learner.algorithm.step_data import NORMALISERS, StepRollouts, Tokens
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import tokens

LENGTHS = (5, 1, 8, 3)
# From the log-probs and the sampler's, each [n], and the advantage of a rollout: its loss, a scalar, or losses [n].
Plain = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def clipped(ratio: torch.Tensor, advantage: float, delta: float = 4.0) -> torch.Tensor:
    """PPO's clip by cases: good tokens up to 1.28, bad ones from 0.8 to delta."""
    return -advantage * (ratio.clamp(max=1.28) if advantage > 0 else ratio.clamp(0.8, delta))


def mean_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (new - old).mean().exp()


def whole_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new.sum().exp() / old.sum().exp()


def cispo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    return -(new - old).exp().clamp(max=1.28).detach() * advantage * new


def dppo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    """M r A, eq. 11, where the bound of the ratio is not reached."""
    ratio = new.exp() / old.exp()
    harmless = (ratio <= 1) if advantage > 0 else (ratio >= 1)
    kept = harmless | ((new.exp() - old.exp()).abs() <= 0.15)
    return -kept.double() * ratio * advantage


def dppo_kl(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    p, q = new.exp(), old.exp()
    moved = torch.distributions.kl_divergence(torch.distributions.Bernoulli(q), torch.distributions.Bernoulli(p))
    harmless = (p <= q) if advantage > 0 else (p >= q)
    return -(harmless | (moved <= 0.05)).double() * (p / q) * advantage


def sapo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    temperature = 1.0 if advantage > 0 else 1.05
    return -4 / temperature / (1 + torch.exp(-temperature * ((new - old).exp() - 1))) * advantage


def vespo(new: torch.Tensor, old: torch.Tensor, advantage: float) -> torch.Tensor:
    weight = whole_ratio(new, old).detach()
    phi = weight**2 * torch.exp(3 - 3 * weight) if advantage >= 0 else weight**3 * torch.exp(2 - 2 * weight)
    return -phi * advantage * new


# By objective: other settings, the normaliser that its formula has, and the formula.
FORMULAS: dict[str, tuple[dict[str, Any], str, Plain]] = {
    "ppo_clip": ({}, "tokens", lambda new, old, a: clipped((new - old).exp(), a)),
    "gspo": ({}, "sequences", lambda new, old, a: clipped(mean_ratio(new, old), a)),
    "sequence_clip": ({}, "rollouts", lambda new, old, a: clipped(whole_ratio(new, old), a)),
    "cispo": ({}, "tokens", cispo),
    "sequence_cispo": (
        {},
        "tokens",
        lambda new, old, a: -mean_ratio(new, old).clamp(max=1.28).detach() * a * new,
    ),
    "dppo": ({}, "tokens", dppo),
    "dppo kl": ({"objective": "dppo", "dppo_divergence": "kl"}, "tokens", dppo_kl),
    "sapo": ({}, "tokens", sapo),
    "vespo": ({}, "tokens", vespo),
    "importance": ({}, "tokens", lambda new, old, a: -(new - old).exp() * a),
    "reinforce": ({}, "tokens", lambda new, old, a: -new * a),
}
# TokenLosses of these have another value than the formula, and the same gradient.
SCORE_FUNCTION = ("dppo", "dppo kl")


def batch(seed: int, normaliser: str, spread: float) -> Tokens:
    """Rollouts of `LENGTHS` in float64, their tokens shuffled."""
    random = np.random.default_rng(seed)
    rollout = random.permutation(np.repeat(np.arange(len(LENGTHS)), LENGTHS))
    count = len(rollout)
    step = StepRollouts.of(np.zeros(len(LENGTHS)), np.zeros(len(LENGTHS), dtype=np.int64), np.array(LENGTHS))
    row = tokens(
        np.exp(random.normal(0, spread, count)),
        random.normal(size=len(LENGTHS))[rollout],
        NORMALISERS[normaliser](step, 64)[rollout],
        rollout=torch.from_numpy(rollout),
        behaviour=torch.from_numpy(random.uniform(-4, -1.5, count)).float(),
    )
    return in_float64(row)


def in_float64(row: Tokens) -> Tokens:
    """Its sums over rollouts are added up again."""
    changes = {f.name: getattr(row, f.name).detach() for f in fields(row) if getattr(row, f.name) is not None}
    changes = {name: value.double() if value.is_floating_point() else value for name, value in changes.items()}
    drift = torch.zeros(len(LENGTHS), dtype=torch.float64)
    drift.index_add_(0, row.rollout, changes["logprobs"] - changes["behaviour"])
    return Tokens(**{**changes, "drift": drift[row.rollout], "logprobs": changes["logprobs"].requires_grad_()})


def part(row: Tokens, places: torch.Tensor) -> Tokens:
    """Some tokens of a row, as their own row: what it knows of whole rollouts stays."""
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    return Tokens(**{name: None if value is None else value[places] for name, value in values.items()})


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [0.05, 0.6])
def test_losses_and_gradients_are_those_of_the_plain_formula(name: str, seed: int, spread: float) -> None:
    settings, normaliser, formula = FORMULAS[name]
    assert {value[0].get("objective", key) for key, value in FORMULAS.items()} == set(OBJECTIVES)
    objective = objectives.build(LearnerSection(**{"objective": name, **settings}))
    row = batch(seed, normaliser, spread)
    rows = [part(row, torch.arange(len(row.rollout)) % 2 == half) for half in (0, 1)]
    assert {*rows[0].rollout.tolist()} & {*rows[1].rollout.tolist()}, "or no rollout stands in two rows"
    loss = sum(objective(half).losses.sum() for half in rows)
    assert isinstance(loss, torch.Tensor)
    (gradient,) = torch.autograd.grad(loss, row.logprobs)

    new = row.logprobs.detach().clone().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for number in range(len(LENGTHS)):
        of = row.rollout == number
        own = formula(new[of], row.behaviour[of], float(row.advantages[of][0]))
        expected = expected + (own.sum() / len(new) if normaliser == "tokens" else own / len(LENGTHS))
    (plain,) = torch.autograd.grad(expected, new)
    # Weights and advantages are float32 numbers.
    torch.testing.assert_close(gradient, plain, rtol=1e-6, atol=1e-12)
    if name not in SCORE_FUNCTION:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["gspo", "sequence_clip", "vespo"])
def test_what_a_correction_takes_for_old_is_what_a_rollout_s_ratio_is_against(name: str) -> None:
    """With old = policy the ratio is 1, whatever the sampler's log-probs: the gradient is the policy gradient."""
    objective = objectives.build(LearnerSection(objective=name))
    row = batch(0, "tokens", 0.6)
    moved = row.but(old=row.logprobs.detach(), old_drift=row.drift)
    (gradient,) = torch.autograd.grad(objective(moved).losses.sum(), row.logprobs)
    torch.testing.assert_close(gradient, -row.advantages * row.weights)
