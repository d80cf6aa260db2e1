"""KL to a reference and entropy, as functions of tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm import advantages, loss_terms
from slipstream.learner.algorithm.advantages import ADVANTAGES, Advantage
from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.corrections import CORRECTIONS, Corrected, Correction
from slipstream.learner.algorithm.loss_terms import KlInLoss, Regulariser
from slipstream.learner.algorithm.step_data import StepRollouts, Tokens
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import joined, tokens
from tests.kit.trl import trl_advantages, trl_loss

SECTIONS: dict[str, dict[str, Any]] = {
    "loss": {"kl_coef": 0.5, "kl_bias_correction": False},
    "corrected": {"kl_coef": 0.5, "delta": "none"},
    "reward": {"kl_coef": 0.5, "kl_in_reward": True},
    "entropy": {"entropy_coef": 0.5},
}


def one(kind: str) -> Regulariser:
    (found,) = loss_terms.build_regularisers(LearnerSection(**SECTIONS[kind]))
    return found


@pytest.fixture(params=SECTIONS)
def regulariser(request: pytest.FixtureRequest) -> Regulariser:
    return one(request.param)


def some_tokens(seed: int, count: int = 40, **changes: Any) -> Tokens:
    """A quarter of them without weight; the reference is about 0.5 nats away."""
    random = torch.Generator().manual_seed(seed)
    ratios = torch.randn(count, generator=random).mul(0.3).exp()
    fields = {
        "reference": torch.randn(count, generator=random) * 0.5 - 2.0,
        "entropy": torch.rand(count, generator=random).requires_grad_(),
        "entropy_weights": torch.full((count,), 0.1),
        **changes,
    }
    weights = (torch.rand(count, generator=random) < 0.75) / 7
    return tokens(ratios.numpy(), np.ones(count), weights.numpy(), **fields)


def test_the_default_has_none() -> None:
    assert not loss_terms.build_regularisers(LearnerSection())
    algorithm = Algorithm(LearnerSection(), 64)
    assert (algorithm.needs_reference, algorithm.needs_entropy, algorithm.kl_in_reward) == (False, False, False)


@pytest.mark.parametrize("distance", [-1.0, 0.0, 0.5])
def test_the_kl_in_the_loss_is_k3_with_its_gradient(distance: float) -> None:
    """The gradient of exp(d) - d - 1, d = log p_reference - log p, by hand: 1 - exp(d) by log p."""
    given = tokens([1.0], [7.0], [0.25], reference=torch.tensor([-2.0 + distance]))
    result = one("loss")(given)
    result.losses.sum().backward()
    assert given.logprobs.grad is not None
    estimate = math.exp(distance) - distance - 1
    assert result.losses.item() == pytest.approx(0.5 * 0.25 * estimate, abs=1e-7)
    assert given.logprobs.grad.item() == pytest.approx(0.5 * 0.25 * (1 - math.exp(distance)), abs=1e-7)
    assert float(result.sums["kl_reference"]) == pytest.approx(estimate, abs=1e-6)


def test_corrected_for_bias_the_kl_has_the_gradient_of_the_kl() -> None:
    """Over all tokens that the sampler may draw, weighted as it draws them: that of KL(policy || reference), which is
    written down here in full; without the correction it is another."""
    random = torch.Generator().manual_seed(0)
    behaviour, reference = (torch.randn(30, generator=random, dtype=torch.float64).log_softmax(0) for _ in range(2))
    logits = torch.randn(30, generator=random, dtype=torch.float64).requires_grad_()

    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    for kind, right in (("corrected", True), ("loss", False)):
        policy = logits.log_softmax(0)
        drawn = tokens(np.ones(30), np.ones(30), behaviour.exp().numpy(), behaviour=behaviour, reference=reference)
        losses = one(kind)(drawn.but(logprobs=policy, weights=behaviour.exp())).losses
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert torch.allclose(gradient, 0.5 * exact, atol=1e-12) == right


@pytest.mark.parametrize("kind", ["loss", "corrected"])
def test_the_gradient_is_the_plain_formula_s(kind: str) -> None:
    given = some_tokens(3)
    one(kind)(given).losses.sum().backward()
    policy = given.logprobs.detach().double().requires_grad_()
    assert given.reference is not None
    apart = given.reference.double() - policy
    ratio = (policy - given.behaviour).exp() if kind == "corrected" else 1.0
    (0.5 * ratio * (apart.exp() - apart - 1) * given.weights).sum().backward()
    assert given.logprobs.grad is not None
    torch.testing.assert_close(given.logprobs.grad.double(), policy.grad, atol=1e-7, rtol=1e-5)


def test_the_kl_in_the_reward_is_taken_off_before_the_advantage() -> None:
    """Leave-one-out by hand: rewards 1 and 0 and a KL of 0.4 and -0.2, half of which counts, make 0.8 and 0.1."""
    algorithm = Algorithm(LearnerSection(advantage="rloo", **SECTIONS["reward"]), 64)
    rollouts = StepRollouts.of(np.array([1.0, 0.0]), np.zeros(2, dtype=np.int64), np.array([3, 3]))
    assert algorithm.advantages(rollouts, np.array([-0.4, 0.2])) == pytest.approx([0.7, -0.7])
    result = one("reward")(given := some_tokens(0))
    assert not result.losses.any()
    assert given.reference is not None
    weighted = given.weights > 0
    k1 = (given.behaviour - given.reference)[weighted].sum()
    assert float(result.sums["kl_reference"]) == pytest.approx(float(k1), abs=1e-5)


def test_the_advantages_are_trl_s_rloo_with_its_kl() -> None:
    random = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 1, generator=random, dtype=torch.float64)
    behaviour, reference = (torch.randn(6, 5, generator=random, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(6, 5, generator=random) < 0.7).long()
    batch = {"old_per_token_logps": behaviour, "ref_per_token_logps": reference, "completion_mask": mask}
    accelerator = SimpleNamespace(process_index=0, reduce=lambda value, **_: value)
    prompts: dict[str, Any] = {"prompts": range(6)}
    own = {"beta": 0.5, "accelerator": accelerator, "_metrics": {"train": defaultdict(list)}}
    theirs = trl_advantages("rloo", rewards, 3, {**batch, **prompts, "mode": "train"}, **own)

    algorithm = Algorithm(LearnerSection(advantage="rloo", **SECTIONS["reward"]), 64)
    rollouts = StepRollouts.of(rewards[:, 0].numpy(), np.arange(6) // 3, mask.sum(1).numpy())
    ours = algorithm.advantages(rollouts, ((reference - behaviour) * mask).sum(1).numpy())
    torch.testing.assert_close(torch.from_numpy(ours), theirs.float())


def test_equal_rewards_are_worth_training_where_the_kl_makes_them_differ() -> None:
    rollouts = StepRollouts.of(np.ones(2), np.zeros(2, dtype=np.int64), np.array([3, 3]))
    algorithm = Algorithm(LearnerSection(advantage="rloo", **SECTIONS["reward"]), 64)
    assert algorithm.advantages(rollouts, np.array([-0.4, 0.2])) == pytest.approx([-0.3, 0.3])
    assert not algorithm.advantages(rollouts, np.array([-0.4, -0.4])).any()


def group(rewards: np.ndarray) -> StepRollouts:
    size = len(rewards)
    return StepRollouts.of(rewards, np.zeros(size, dtype=np.int64), np.full(size, 3))


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_only_a_kl_in_the_reward_keeps_groups_of_equal_rewards(advantage: str) -> None:
    def of(kind: str) -> Advantage:
        return advantages.build(LearnerSection(advantage=advantage, **SECTIONS[kind]))

    assert not of("reward").stays_flat(group(np.ones(2)))
    assert of("reward").stays_flat(group(np.ones(1)))
    assert of("loss").stays_flat(group(np.ones(2)))
    assert not of("loss").stays_flat(group(np.array([0.0, 1.0])))


def test_the_bonus_is_a_mean_over_the_step_s_tokens_whatever_the_normaliser_is() -> None:
    given = some_tokens(0, entropy_weights=torch.full((40,), 1 / 40))
    one("entropy")(given).losses.sum().backward()
    weighted = given.weights > 0
    assert given.entropy.grad is not None
    torch.testing.assert_close(given.entropy.grad, torch.where(weighted, -0.5 / 40, 0.0))
    assert given.logprobs.grad is None


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    ("loss_type", "normaliser"), [("grpo", "sequences"), ("dapo", "tokens"), ("dr_grpo", "constant")]
)
def test_equals_trl_s_loss_with_kl_and_entropy(loss_type: str, normaliser: str, corrected: bool) -> None:
    """Value and gradient, on rollouts of different lengths with tool tokens among them."""
    random = np.random.default_rng(4)
    sizes, longest = [5, 9, 2, 7], 9
    mask = np.arange(longest) < np.array(sizes)[:, None]
    tool = np.ones((4, longest), dtype=int)
    tool[1, 3:6] = 0
    trained = torch.from_numpy(mask & (tool == 1))
    behaviour, reference = (torch.from_numpy(random.normal(-2, 0.4, (4, longest))) for _ in range(2))
    policy = (behaviour + torch.from_numpy(random.normal(0, 0.3, (4, longest)))).requires_grad_()
    entropy = torch.from_numpy(random.random((4, longest))).requires_grad_()
    advantages = torch.from_numpy(random.normal(size=4))
    inputs = {
        "completion_mask": torch.from_numpy(mask.astype(int)),
        "tool_mask": torch.from_numpy(tool),
        "advantages": advantages,
        "old_per_token_logps": behaviour,
        "ref_per_token_logps": reference,
    }
    theirs = trl_loss(
        "grpo",
        inputs,
        policy,
        beta=0.04,
        loss_type=loss_type,
        epsilon_high=0.28,
        entropy_coef=0.01,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=True,
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, entropy, None),
        args=type("Args", (), {"delta": None, "steps_per_generation": 1, "use_bias_correction_kl": corrected}),
    )
    expected = torch.autograd.grad(theirs, [policy, entropy])

    section = LearnerSection(
        normaliser=normaliser, kl_coef=0.04, kl_bias_correction=corrected, entropy_coef=0.01, clip_high=0.28
    )
    algorithm = Algorithm(section, longest)
    number, _ = (places := trained.nonzero()).T
    counts = trained.sum(1)
    rollouts = StepRollouts.of(np.zeros(4), np.zeros(4, dtype=np.int64), counts.numpy())
    ours = [leaf.detach().clone().requires_grad_() for leaf in (policy, entropy)]
    row = tokens(
        np.ones(len(places)),
        advantages[number],
        algorithm.weights(rollouts)[number],
        rollout=number,
        behaviour=behaviour[trained],
        reference=reference[trained],
        entropy_weights=torch.full((len(places),), 1 / len(places)),
    )
    loss = algorithm(row.but(logprobs=ours[0][trained], entropy=ours[1][trained])).losses.sum()
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-7)
    for one_s, other_s in zip(torch.autograd.grad(loss, ours), expected, strict=True):
        torch.testing.assert_close(one_s, other_s, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("wild", [-1e9, -100.0, 100.0, 1e9])
def test_a_token_without_weight_has_no_part_in_anything(regulariser: Regulariser, wild: float) -> None:
    """A tool's, say, whatever the reference makes of it: 0 * inf would be NaN."""
    plain = {"entropy_weights": torch.ones(2), "entropy": torch.ones(2).requires_grad_()}
    both = tokens([1, 1], [1, 1], [1.0, 0.0], reference=torch.tensor([-1.0, wild]), **plain)
    result = regulariser(both)
    alone = regulariser(
        tokens([1], [1], reference=torch.tensor([-1.0]), entropy=torch.ones(1), entropy_weights=torch.ones(1))
    )
    assert result.losses.tolist() == [alone.losses.item(), 0.0]
    assert {name: float(value) for name, value in result.sums.items()} == {
        name: float(value) for name, value in alone.sums.items()
    }
    if result.losses.requires_grad:
        result.losses.sum().backward()
        gradients = [of.grad for of in (both.logprobs, both.entropy) if of.grad is not None]
        assert [gradient[1].item() for gradient in gradients] == [0.0]


@pytest.mark.parametrize("distance", [-1e9, -100.0, 100.0, 1e9])
@pytest.mark.parametrize("kind", ["loss", "corrected"])
def test_a_wild_token_moves_towards_the_reference_and_stays_finite(kind: str, distance: float) -> None:
    given = tokens([1], [1], reference=torch.tensor([-2.0 + distance]))
    result = one(kind)(given)
    result.losses.sum().backward()
    assert given.logprobs.grad is not None
    assert torch.isfinite(torch.stack([result.losses[0], given.logprobs.grad[0]])).all()
    assert torch.isfinite(result.sums["kl_reference"])
    assert (given.logprobs.grad.item() < 0) == (distance > 0)


def test_packing_cannot_change_the_losses_or_the_sums(regulariser: Regulariser) -> None:
    first, second = some_tokens(1), some_tokens(2, count=7)
    apart, together = [regulariser(first), regulariser(second)], regulariser(joined(first, second))
    torch.testing.assert_close(together.losses, torch.cat([result.losses for result in apart]))
    for name, value in together.sums.items():
        torch.testing.assert_close(value, apart[0].sums[name] + apart[1].sums[name], msg=name)
        assert value.shape == ()
        assert not value.requires_grad


class NothingLeft(Correction):
    """Masks all tokens."""

    def __call__(self, tokens: Tokens) -> Corrected:
        return Corrected(tokens.masked(torch.zeros_like(tokens.weights, dtype=torch.bool)), {})


@pytest.mark.parametrize("kind", ["loss", "corrected", "entropy"])
def test_a_correction_s_masks_and_weights_do_not_touch_it(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(CORRECTIONS, "none", NothingLeft)
    given = some_tokens(0)
    torch.testing.assert_close(Algorithm(LearnerSection(**SECTIONS[kind]), 64)(given).losses, one(kind)(given).losses)


@pytest.mark.parametrize("kind", ["loss", "corrected", "reward"])
def test_the_figure_is_a_mean_over_the_trained_tokens(kind: str) -> None:
    algorithm = Algorithm(LearnerSection(**SECTIONS[kind]), 64)
    given = some_tokens(0)
    figures = algorithm.metrics({name: float(value) for name, value in algorithm(given).sums.items()})
    expected = float(one(kind)(given).sums["kl_reference"]) / int((given.weights > 0).sum())
    assert figures["kl_reference"] == pytest.approx(expected)


@pytest.mark.parametrize("log_ratio", [-60.0, -18.0, 18.0, 60.0])
def test_one_wild_token_does_not_make_the_gradient_through_the_kl(log_ratio: float) -> None:
    """As `delta` holds it in the objective."""
    section = LearnerSection(kl_coef=0.04)
    row = tokens([1.0], [1.0], behaviour=torch.tensor([-60.0]), logprobs=torch.tensor([-60.0 + log_ratio]))
    KlInLoss(section)(row.but(reference=torch.tensor([-2.0]))).losses.sum().backward()
    assert row.logprobs.grad is not None
    assert abs(row.logprobs.grad.item()) <= 0.04 * section.delta * 120


@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_a_teacher_alone_has_the_gradient_of_the_reverse_kl(coef: float) -> None:
    """Over all tokens that the sampler may draw, weighted as it draws them: that of KL(policy || teacher) in float64,
    also where the policy has moved since."""
    random = torch.Generator().manual_seed(1)
    behaviour, teacher, start = (torch.randn(30, generator=random, dtype=torch.float64) for _ in range(3))
    behaviour, teacher, logits = behaviour.log_softmax(0), teacher.log_softmax(0), start.requires_grad_()

    policy = logits.log_softmax(0)
    exact_kl = (policy.exp() * (policy - teacher)).sum()
    (exact,) = torch.autograd.grad(exact_kl, logits)
    policy = logits.log_softmax(0)
    section = LearnerSection(objective="importance", correction="none")
    drawn = tokens(np.ones(30), np.zeros(30), behaviour.exp().numpy(), behaviour=behaviour, teacher=teacher)
    drawn = drawn.but(logprobs=policy, weights=behaviour.exp(), proximal=policy.detach(), advantages=torch.zeros(30))
    result = Algorithm(section, 64, teacher_coef=coef)(drawn)
    (gradient,) = torch.autograd.grad(result.losses.sum(), logits)
    assert torch.allclose(gradient, coef * exact, atol=1e-12)


def test_the_teacher_s_kl_is_told_per_token() -> None:
    given = some_tokens(2, teacher=torch.full((40,), -3.0))
    algorithm = Algorithm(LearnerSection(), 64)
    sums = {name: float(value) for name, value in algorithm(given).sums.items()}
    weighted = given.weights > 0
    expected = float((given.logprobs.detach() + 3.0)[weighted].mean())
    assert algorithm.metrics(sums)["teacher/kl"] == pytest.approx(expected, abs=1e-5)


def test_a_teacher_s_likeliest_ids_teach_by_forward_kl() -> None:
    """Its gradient in float64, for each token by its weight; the objective has no part in it."""
    random = torch.Generator().manual_seed(3)
    teacher = torch.randn(5, 8, generator=random, dtype=torch.float64).log_softmax(1)
    logits = torch.randn(5, 8, generator=random, dtype=torch.float64).requires_grad_()
    weights = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4], dtype=torch.float64)
    top = teacher.topk(3, dim=1)
    policy = logits.log_softmax(1)
    wanted = (weights[:, None] * top.values.exp() * (top.values - policy.gather(1, top.indices))).sum()
    (exact,) = torch.autograd.grad(0.5 * wanted, logits, retain_graph=True)

    given = tokens(np.ones(5), np.zeros(5), weights.numpy(), teacher=torch.zeros(5), teacher_top=top.values)
    given = given.but(weights=weights, advantages=torch.zeros(5), others=policy.gather(1, top.indices))
    algorithm = Algorithm(LearnerSection(), 64, teacher_coef=0.5)
    result = algorithm(given)
    (gradient,) = torch.autograd.grad(result.losses.sum(), logits)
    assert torch.allclose(gradient, exact, atol=1e-12)
    told = (top.values.exp() * (top.values - policy.gather(1, top.indices))).sum(1)[weights > 0].mean()
    sums = {name: float(value) for name, value in result.sums.items()}
    assert algorithm.metrics(sums)["teacher/kl"] == pytest.approx(float(told.detach()))
