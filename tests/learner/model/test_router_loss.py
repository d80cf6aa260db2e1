"""The loss that keeps experts evenly used: transformers' formula, exact whatever the packing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from slipstream.learner.algorithm.loss_terms import RouterLoss, Routing
from slipstream.learner.feed.packing import Sample, pack
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection
from tests.kit.learner import step_rollouts
from tests.learner.families import MIXTURES, TEXT
from tests.learner.model.test_model_families import samples

SCORING = Scoring(1.0, 16, routing=True)


def test_by_hand() -> None:
    """Two tokens, both to expert 0 of two, with probability 3/4: f = (1, 0), P = (3/4, 1/4), 2 * 3/4."""
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0]]).log()
    routing = Routing.of([logits], 1, torch.tensor([1, 1]))
    assert RouterLoss(0.1, [routing]).share(routing) == pytest.approx(1.5)
    assert RouterLoss(0.1, [routing])(routing) == pytest.approx(0.15)


def test_it_is_transformers_own_in_value_and_gradient() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(12, 4, requires_grad=True) for _ in range(3)]
    copies = torch.tensor([2, 1, 3, 1, 1, 1, 1, 1, 1, 2, 1, 1])
    theirs = load_balancing_loss_func(tuple(layer.repeat_interleave(copies, 0) for layer in logits), 4, 2)
    expected = torch.autograd.grad(theirs, logits)
    rows = [Routing.of([layer[part] for layer in logits], 2, copies[part]) for part in (slice(5), slice(5, 12))]
    loss = RouterLoss(1.0, rows)
    ours = loss(rows[0]) + loss(rows[1])
    torch.testing.assert_close(ours, theirs)
    for gradient, one in zip(torch.autograd.grad(ours, logits), expected, strict=True):
        torch.testing.assert_close(gradient, one)


def policy(path: Path, name: str = "Mixtral") -> Policy:
    torch.manual_seed(0)
    {**MIXTURES, **TEXT}[name]().save_pretrained(path)
    return load_policy(str(path), ModelSection(path=str(path)), SCORING)


def gradients(policy: Policy, items: list[Sample], budget: int) -> tuple[dict[str, torch.Tensor], float | None]:
    """The gradient of a step, before it is clipped, by name; and the loss of the routers."""
    section = LearnerSection(router_aux_loss_coef=0.5, max_grad_norm=1e9)
    trainer = PolicyTrainer(policy, section, 64)
    found: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        found.update({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})

    trainer.optimiser.optimizer.register_step_pre_hook(keep)
    figures = trainer.step(pack(items, budget), step_rollouts(items))
    return found, figures.objective["aux_loss"]


def test_the_step_s_gradient_does_not_depend_on_packing(tmp_path: Path) -> None:
    items = samples()
    assert len(pack(items, 400)) == 1
    assert len(pack(items, 80)) > 1
    together, loss = gradients(policy(tmp_path / "a"), items, 400)
    apart, other = gradients(policy(tmp_path / "b"), items, 80)
    assert loss == pytest.approx(other, rel=1e-5)
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], atol=1e-5, rtol=1e-4)


def test_what_sequences_share_counts_for_each(tmp_path: Path) -> None:
    """As if each sequence were forwarded by itself through transformers' own."""
    items = samples()
    shared = policy(tmp_path / "a")
    _, loss = gradients(shared, items, 400)
    fresh = load_policy(str(tmp_path / "a"), ModelSection(path=str(tmp_path / "a")), SCORING)
    logits = []
    for item in items:
        ids = torch.from_numpy(item.forwarded).long()[None]
        fresh.model.set_attn_implementation("eager")
        with torch.no_grad():
            logits.append(fresh.text(input_ids=ids, output_router_logits=True, use_cache=False).router_logits)
    pooled = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    assert loss == pytest.approx(float(load_balancing_loss_func(pooled, 4, 2)), rel=1e-4)


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef: LlamaForCausalLM is not a mixture"):
        policy(tmp_path, "Llama")
