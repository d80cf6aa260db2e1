"""Demonstrations next to rollouts in one step: two losses, one gradient, and the metrics of rollouts stay their own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.demonstrations import Demonstrations, rows_of
from slipstream.learner.feed.packing import PackedRow, pack
from slipstream.learner.run import build_trainer
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import RunConfig
from tests.kit import LEARNER, config
from tests.kit.learner import step_rollouts
from tests.learner.feed.test_demonstrations import conversations
from tests.learner.ranks.test_ranks import STILL, SURVEYED, samples_of, step

COEF = 0.3
SOME = conversations([12, 20, 9, 16, 24])


def run_file(model_path: Path, **learner: Any) -> RunConfig:
    return config(
        LEARNER,
        model={"path": str(model_path)},
        demonstrations={"path": "demos.jsonl", "batch_size": 3},
        learner={**STILL, "demonstrations_coef": COEF, **learner},
    )


def batch(seed: int = 0) -> tuple[list[PackedRow], StepRollouts]:
    samples = samples_of([20, 30, 25, 12], 2, seed)
    return pack(samples, 64), step_rollouts(samples)


@pytest.mark.parametrize(
    "learner", [{}, SURVEYED, {"algorithm": "gspo", "num_iterations": 2}], ids=["plain", "surveyed", "twice"]
)
def test_the_gradient_is_that_of_the_rollouts_and_the_coefficient_times_the_cross_entropy(
    model_path: Path, learner: dict[str, Any]
) -> None:
    here = run_file(model_path, **learner)
    mixed, alone = build_trainer(here, None, demonstrations=SOME), build_trainer(here, None)
    rows, rollouts = batch()
    chosen = Demonstrations(SOME, 3, here.run.seed).of_step(1)
    taught = rows_of(chosen, COEF, here.learner.token_budget)
    metrics, gradient = step(mixed, rows, rollouts)
    plain, of_rollouts = step(alone, rows, rollouts)
    only, of_taught = step(alone, taught, StepRollouts.none())
    # Adam's first moment after n updates of one gradient.
    for found, one, other in zip(gradient, of_rollouts, of_taught, strict=True):
        torch.testing.assert_close(found, one + other, rtol=1e-4, atol=1e-6)
    assert metrics.loss == pytest.approx(plain.loss + only.loss, rel=1e-5)
    assert metrics.beside["demonstrations/loss"] == pytest.approx(only.loss / COEF, rel=1e-5)
    kept, right = asdict(metrics), asdict(plain)
    assert kept["objective"] == pytest.approx(right["objective"], rel=1e-5)
    for name in ("entropy", "log_ratio_max", "sampler_kl_staleness_0", "sampler_tokens_staleness_0"):
        assert kept[name] == pytest.approx(right[name], rel=1e-5), name
    drift = [name for name in right["beside"] if name.startswith("sampler/")]
    assert {name: kept["beside"][name] for name in drift} == pytest.approx(
        {name: right["beside"][name] for name in drift}
    )


def moved(trainer: PolicyTrainer, seeds: list[int]) -> dict[str, torch.Tensor]:
    for seed in seeds:
        trainer.step(*batch(seed))
    return {name: weight.clone() for name, weight in trainer.weights()}


def test_a_resumed_learner_mixes_in_what_would_have_come(model_path: Path) -> None:
    here = run_file(model_path, learning_rate=1e-2)
    whole = build_trainer(here, None, demonstrations=SOME)
    right = moved(whole, [0, 1, 2, 3])
    first = build_trainer(here, None, demonstrations=SOME)
    half, state = moved(first, [0, 1]), first.state()
    resumed = build_trainer(here, None, demonstrations=SOME)
    for name, weight in resumed.policy.model.named_parameters():
        weight.data.copy_(half[name])
    resumed.restore(state)
    for name, weight in moved(resumed, [2, 3]).items():
        torch.testing.assert_close(weight, right[name], rtol=0, atol=0, msg=name)


def test_without_a_coefficient_a_step_is_as_it_was(model_path: Path) -> None:
    here = run_file(model_path, demonstrations_coef=0.0)
    rows, rollouts = batch()
    metrics, gradient = step(build_trainer(here, None, demonstrations=SOME), rows, rollouts)
    plain, right = step(build_trainer(here, None), rows, rollouts)
    assert metrics.loss == plain.loss
    assert all(torch.equal(found, one) for found, one in zip(gradient, right, strict=True))
    assert not any(name.startswith("demonstrations/") for name in metrics.beside)
