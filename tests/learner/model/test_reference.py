"""The reference model next to the policy, and steps with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.learner.feed.packing import PackedRow, Sample, pack
from slipstream.learner.model.policy import Policy
from slipstream.learner.model.reference import ReferenceModel
from slipstream.learner.training.passes import Known, Preparation, consult, in_several_rows
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import gradients, sample, step_rollouts

MakePolicy = Callable[..., Policy]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def moved(policy: Policy, by: float = 0.05) -> Policy:
    """The policy, away from where it was loaded."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return policy


def trainer_of(make_policy: MakePolicy, **settings: Any) -> PolicyTrainer:
    """With a policy that has moved away from its reference, which it can show as `own`."""
    section = LearnerSection(learning_rate=1e-2, advantage="rloo", **settings)
    reference = ReferenceModel(make_policy()) if section.kl_coef else None
    return PolicyTrainer(moved(make_policy()), section, 64, reference)


def samples_of_several_segments() -> list[Sample]:
    """Four rollouts of two segments each, in two groups."""
    return [sample(14, 4, seed=2 * i + j, rollout=i) for i in range(4) for j in range(2)]


def gradients_of(trainer: PolicyTrainer, samples: Sequence[Sample], budget: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step's loss, taken before the optimiser steps."""
    found: dict[str, torch.Tensor] = {}
    hook = trainer.optimiser.optimizer.register_step_pre_hook(lambda *_: found.update(gradients(trainer.policy)))
    trainer.step(pack(samples, budget), step_rollouts(samples))
    hook.remove()
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"kl_coef": 0.3},
    "plain": {"kl_coef": 0.3, "kl_bias_correction": False, "normaliser": "sequences"},
    "reward": {"kl_coef": 0.3, "kl_in_reward": True},
    "entropy": {"entropy_coef": 0.3, "normaliser": "rollouts"},
    "both": {"kl_coef": 0.3, "entropy_coef": 0.3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_packing_cannot_change_the_gradient(make_policy: MakePolicy, name: str) -> None:
    """With 16 tokens a row, the two segments of a rollout stand in different ones."""
    samples = samples_of_several_segments()
    assert in_several_rows(pack(samples, 16))
    assert len(pack(samples, 512)) == 1
    settings = {**SETTINGS[name], "max_grad_norm": 1e6}
    together = gradients_of(trainer_of(make_policy, **settings), samples, 512)
    apart = gradients_of(trainer_of(make_policy, **settings), samples, 16)
    without = gradients_of(trainer_of(make_policy, max_grad_norm=1e6), samples, 512)
    for parameter, gradient in together.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(apart[parameter], gradient, atol=3e-6 * max(1.0, scale), rtol=1e-4, msg=parameter)
    assert any(not torch.allclose(without[of], together[of], rtol=1e-2) for of in together), "or nothing is tested"


def test_the_reference_never_moves_unless_asked(make_policy: MakePolicy) -> None:
    model = make_policy()
    trainer = PolicyTrainer(make_policy(), LearnerSection(learning_rate=1e-2, kl_coef=0.1), 64, ReferenceModel(model))
    before, policy = weights(model), weights(trainer.policy)
    samples = samples_of_several_segments()
    figures = [trainer.step(pack(samples, 64), step_rollouts(samples)).objective for _ in range(2)]
    assert same(weights(model), before)
    assert not same(weights(trainer.policy), policy)
    assert figures[0]["kl_reference"] == pytest.approx(0, abs=1e-6), "at first the policy is the reference"
    assert (figures[1]["kl_reference"] or 0) > 1e-4
    assert "reference" not in trainer.state(), "model.path still holds it"
    assert not model.model.training
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def test_a_kl_in_the_loss_holds_the_policy_back(make_policy: MakePolicy) -> None:
    """The farther from the reference, the more the strong one wants to go back."""
    samples = samples_of_several_segments()
    last = []
    for coefficient in (1e-6, 10.0):
        trainer = trainer_of(make_policy, kl_coef=coefficient)
        steps = [trainer.step(pack(samples, 64), step_rollouts(samples)).objective["kl_reference"] for _ in range(8)]
        last.append(steps[-1] or 0.0)
    assert last[1] < 0.5 * last[0]


def test_a_bonus_raises_the_entropy(make_policy: MakePolicy) -> None:
    samples = samples_of_several_segments()
    last = []
    for coefficient in (0.0, 10.0):
        trainer = trainer_of(make_policy, entropy_coef=coefficient)
        last.append([trainer.step(pack(samples, 64), step_rollouts(samples)).entropy for _ in range(4)][-1])
    assert (last[1] or 0) > (last[0] or 0) + 0.1


def test_the_bonus_is_the_mean_entropy_of_the_step(make_policy: MakePolicy) -> None:
    """Rewards that are all equal leave nothing else in the loss."""
    trainer = trainer_of(make_policy, entropy_coef=0.3, normaliser="rollouts")
    samples = samples_of_several_segments()
    rollouts = step_rollouts(samples)
    figures = trainer.step(pack(samples, 16), rollouts.with_rewards(np.ones(4)))
    assert figures.loss == pytest.approx(-0.3 * (figures.entropy or 0.0), rel=1e-5)
    assert (figures.objective["policy_loss"], figures.objective["entropy_coef"]) == (pytest.approx(0, abs=1e-6), 0.3)


def test_the_policy_s_loss_is_that_without_the_bonus(make_policy: MakePolicy) -> None:
    samples = samples_of_several_segments()
    with_bonus, without = (
        trainer_of(make_policy, entropy_coef=coefficient).step(pack(samples, 16), step_rollouts(samples))
        for coefficient in (0.3, 0.0)
    )
    assert with_bonus.objective["policy_loss"] == pytest.approx(without.loss, rel=1e-4)
    assert "policy_loss" not in without.objective


def test_log_probs_are_at_the_sampler_s_temperature(make_policy: MakePolicy) -> None:
    (row,) = pack([sample(12, 3, 0)], 32)
    warm = ReferenceModel(make_policy(temperature=2.0)).logprobs(row)
    assert not warm.requires_grad
    torch.testing.assert_close(warm, make_policy(temperature=2.0)(row).logprobs.detach())


def test_the_kl_in_the_reward_is_over_sampled_tokens_of_the_whole_rollout(make_policy: MakePolicy) -> None:
    """By hand from the reference's log-probs of each sequence alone, and whatever stands where a tool spoke."""
    trainer = trainer_of(make_policy, kl_coef=0.3, kl_in_reward=True)
    samples = samples_of_several_segments()
    rollouts = step_rollouts(samples)
    reference = make_policy()
    kl = np.zeros(4)
    for item in samples:
        sampled = np.flatnonzero(item.weights)
        kl[item.rollout] += (item.behaviour[sampled] - reference.score(item.token_ids.tolist())[sampled - 1]).sum()
    penalised = rollouts.rewards - 0.3 * kl
    expected = (penalised - penalised[[1, 0, 3, 2]]).tolist()

    not_sampled = [np.where(item.weights > 0, item.behaviour, -99.0).astype(np.float32) for item in samples]
    wild = [replace(item, behaviour=behaviour) for item, behaviour in zip(samples, not_sampled, strict=True)]
    for budget, of in ((16, samples), (512, wild)):
        rows = pack(of, budget)
        known = consult(ReferenceModel(reference), rows, [Known()] * len(rows))
        prepared = Preparation(trainer.algorithm, rollouts, rows, known, torch.device("cpu"))
        for row, of_row in zip(rows, known, strict=True):
            tokens = prepared.tokens(row, trainer.policy(row), of_row)
            torch.testing.assert_close(tokens.advantages, torch.tensor(expected).float()[row.rollout])


def test_a_reference_follows_by_its_share_every_so_many_steps(make_policy: MakePolicy) -> None:
    model = make_policy()
    section = LearnerSection(learning_rate=1e-2, kl_coef=0.1, reference_sync_steps=2, reference_mixup=0.25)
    trainer = PolicyTrainer(make_policy(), section, 64, ReferenceModel(model))
    began = weights(model)
    samples = samples_of_several_segments()
    trainer.step(pack(samples, 64), step_rollouts(samples))
    assert same(weights(model), began)
    assert "reference" not in trainer.state()
    trainer.step(pack(samples, 64), step_rollouts(samples))
    now, policy = weights(model), weights(trainer.policy)
    for name, weight in began.items():
        torch.testing.assert_close(now[name], 0.25 * policy[name] + 0.75 * weight)
    assert not same(now, began)
    assert same(trainer.state()["reference"], now)


def test_a_reference_comes_back_as_it_was(make_policy: MakePolicy) -> None:
    source = ReferenceModel(make_policy())
    assert source.state() is None
    source.follow(moved(make_policy()), 1.0)
    state = source.state()
    assert state is not None
    target = make_policy()
    restored = ReferenceModel(target)
    restored.restore({name: weight.clone() for name, weight in state.items()})
    again = restored.state()
    assert again is not None
    assert same(again, state)
    assert same(weights(target), weights(moved(make_policy())))


def test_a_reference_is_asked_for_where_it_is_needed(make_policy: MakePolicy) -> None:
    with pytest.raises(ValueError, match=r"learner.kl_coef = 0.1 needs a reference"):
        PolicyTrainer(make_policy(), LearnerSection(kl_coef=0.1), 64)


def test_without_a_coefficient_there_is_one_pass_a_row(make_policy: MakePolicy) -> None:
    """And the reference that somebody gave all the same is not asked."""

    class Untouched(ReferenceModel):
        def logprobs(self, row: PackedRow) -> torch.Tensor:
            raise AssertionError("a pass that nobody needs")

    trainer = PolicyTrainer(make_policy(), LearnerSection(), 64, Untouched(make_policy()))
    passes: list[object] = []
    trainer.policy.register_forward_hook(lambda *_: passes.append(1))
    samples = samples_of_several_segments()
    rows = pack(samples, 64)
    trainer.step(rows, step_rollouts(samples))
    assert len(passes) == len(rows)
