"""Several updates on one step's rows (`learner.num_iterations`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.learner.algorithm import corrections
from slipstream.learner.algorithm.corrections import ProximalInputs
from slipstream.learner.feed.packing import pack
from slipstream.learner.model.policy import Policy
from slipstream.learner.training.base import DivergedError, StepMetrics
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import sample, step_rollouts

SAMPLES = [sample(20, 5, seed, rollout=seed // 2) for seed in range(8)]
ROLLOUTS = step_rollouts(SAMPLES)
ROWS = pack(SAMPLES, 70)


def trainer(policy: Policy, **settings: Any) -> PolicyTrainer:
    return PolicyTrainer(policy, LearnerSection(**{"learning_rate": 1e-2, **settings}), longest=64)


def weights(of: PolicyTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in of.policy.parameters()]


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo"])
def test_three_updates_against_the_sampler_are_three_steps_on_the_same_rows(
    make_policy: Callable[..., Policy], objective: str
) -> None:
    normaliser = "sequences" if objective == "gspo" else "tokens"
    settings = {"objective": objective, "correction": "none", "normaliser": normaliser}
    once, thrice = (trainer(make_policy(), num_iterations=number, **settings) for number in (1, 3))
    alone = [once.step(ROWS, ROLLOUTS) for _ in range(3)]
    together = thrice.step(ROWS, ROLLOUTS)
    for mine, theirs in zip(weights(thrice), weights(once), strict=True):
        assert torch.equal(mine, theirs)
    assert together.beside["updates"] == 3
    assert together.loss == pytest.approx(sum(step.loss for step in alone) / 3)
    assert together.log_ratio_max == alone[0].log_ratio_max, "that is of the policy that samples"
    assert (once.schedule.last_epoch, thrice.schedule.last_epoch) == (3, 1)


def test_later_updates_are_held_to_the_policy_before_the_step(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def proximal(inputs: ProximalInputs) -> torch.Tensor:
        seen.append(inputs.logprobs)
        return inputs.logprobs

    monkeypatch.setitem(corrections.PROXIMALS, "recomputed", proximal)
    moving = trainer(
        make_policy(), num_iterations=2, algorithm="grpo", correction="token_truncate", proximal="recomputed"
    )
    metrics = moving.step(ROWS, ROLLOUTS)
    first, second = seen[: len(ROWS)], seen[len(ROWS) :]
    assert len(second) == len(ROWS) > 1
    for before, again in zip(first, second, strict=True):
        assert torch.equal(before, again)
    clipped = [value for name, value in metrics.objective.items() if name.startswith("clip_ratio") and value]
    assert clipped, "the ratio to the policy before the step is not 1 in the second update"


def test_the_policy_before_the_last_step_is_the_one_before_its_first_update(
    make_policy: Callable[..., Policy],
) -> None:
    moving = trainer(make_policy(), num_iterations=3, algorithm="decoupled_ppo", proximal="last_step")
    before = weights(moving)
    moving.step(ROWS, ROLLOUTS)
    assert moving.previous_weights is not None
    with moving.previous_weights.in_place():
        assert all(torch.equal(mine, was) for mine, was in zip(weights(moving), before, strict=True))


def test_an_update_that_diverges_ends_the_step_and_in_the_first_one_nothing_has_changed(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = trainer(make_policy(), num_iterations=3)
    update, made = PolicyTrainer._update, 0

    def failing(of: PolicyTrainer, *given: Any) -> tuple[StepMetrics, Any]:
        nonlocal made
        made += 1
        if made in (3, 4):
            raise DivergedError("not finite")
        return update(of, *given)

    monkeypatch.setattr(PolicyTrainer, "_update", failing)
    assert moving.step(ROWS, ROLLOUTS).beside["updates"] == 2
    with pytest.raises(DivergedError):
        moving.step(ROWS, ROLLOUTS)
    assert moving.schedule.last_epoch == 1
