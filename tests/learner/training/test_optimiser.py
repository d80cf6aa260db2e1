"""Optimisers by transformers' names: that each steps, that its state comes back, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from transformers.training_args import OptimizerNames

from slipstream.learner.checkpoints import checkpoint
from slipstream.learner.checkpoints.checkpoint import CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.feed.packing import pack
from slipstream.learner.model.build import load_policy
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.training import optimiser
from slipstream.learner.training.optimiser import MuonWithAdamW
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import ConfigError, LearnerSection, ModelSection
from slipstream.protocol.config.sections.learner import OptimiserName
from tests.kit.learner import sample, step_rollouts

MakePolicy = Callable[..., Policy]
NAMES = get_args(OptimiserName)
# Those that need no package of their own.
HERE = ("adamw_torch_fused", "adamw_torch", "adafactor", "muon", "sgd", "adagrad", "rmsprop")


def train(trainer: PolicyTrainer, steps: range) -> list[float]:
    rates = []
    for step in steps:
        samples = [sample(12, 3, 10 * step + i, rollout=i) for i in range(4)]
        rates.append(trainer.step(pack(samples, 32), step_rollouts(samples)).learning_rate)
    return rates


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.policy.named_weights()}


def section(optim: str, **more: Any) -> LearnerSection:
    given = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 3, "steps": 20, "optim": optim, **more}
    return LearnerSection(**given)


def saved(trainer: PolicyTrainer, model_path: Path, tmp_path: Path, step: int) -> checkpoint.Checkpoint:
    sources = Sources(ModelSection(path=str(model_path)))
    return checkpoint.save(tmp_path, CheckpointInfo(step, step), trainer, sources, keep=1)


def resumed(found: checkpoint.Checkpoint, learner: LearnerSection) -> PolicyTrainer:
    path = str(found.model_path)
    trainer = PolicyTrainer(load_policy(path, ModelSection(path=path), Scoring(1.0, 16)), learner, 64)
    checkpoint.restore(found, trainer)
    return trainer


def test_the_names_are_those_of_transformers() -> None:
    assert {*NAMES} - {"muon"} <= {name.value for name in OptimizerNames}


@pytest.mark.parametrize("optim", HERE)
def test_two_steps_resumed_for_two_equal_four_to_the_bit(
    make_policy: MakePolicy, model_path: Path, tmp_path: Path, optim: str
) -> None:
    learner = section(optim, lr_scheduler_type="cosine")
    whole, half = PolicyTrainer(make_policy(), learner, 64), PolicyTrainer(make_policy(), learner, 64)
    before = weights(whole)
    rates = train(whole, range(4))
    train(half, range(2))
    again = resumed(saved(half, model_path, tmp_path, 2), learner)
    assert train(again, range(2, 4)) == rates[2:]
    after = weights(whole)
    for name, weight in weights(again).items():
        assert torch.equal(weight, after[name]), name
    assert all(not torch.equal(before[name], after[name]) for name in before), "every weight trains"


def test_adamw_is_what_it_was_to_the_bit(make_policy: MakePolicy) -> None:
    trainer = PolicyTrainer(make_policy(), section("adamw_torch_fused", warmup_steps=0), 64)
    reference = make_policy()
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)

    def lend(*_: object) -> None:
        for ours, theirs in zip(trainer.policy.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.clone()

    trainer.optimiser.optimizer.register_step_pre_hook(lend)
    for step in range(3):
        train(trainer, range(step, step + 1))
        adamw.step()
    for ours, theirs in zip(trainer.policy.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_changed_rate_schedule_and_decay_are_used_from_the_step_on(
    make_policy: MakePolicy, model_path: Path, tmp_path: Path
) -> None:
    first = PolicyTrainer(make_policy(), section("adamw_torch"), 64)
    train(first, range(4))
    found = saved(first, model_path, tmp_path, 4)
    changed = section("adamw_torch_fused", learning_rate=4e-3, weight_decay=0.2, lr_scheduler_type="linear")
    trainer = resumed(found, changed)
    assert train(trainer, range(4, 6)) == pytest.approx([4e-3 * 16 / 17, 4e-3 * 15 / 17])
    groups = trainer.optimiser.param_groups
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert all(group["fused"] for group in groups)
    kept = torch.load(found.path / "trainer.pt", weights_only=True)["optimiser"]["state"][0]["exp_avg"]
    assert kept.abs().max() > 0
    steps = {int(of["step"]) for of in trainer.optimiser.state.values()}
    assert steps == {6}, "AdamW's memory is that of the checkpoint"


def test_another_optimiser_starts_anew_at_the_schedule_s_step(
    make_policy: MakePolicy, model_path: Path, tmp_path: Path
) -> None:
    first = PolicyTrainer(make_policy(), section("adamw_torch"), 64)
    train(first, range(4))
    found = saved(first, model_path, tmp_path, 4)
    learner = section("muon", lr_scheduler_type="linear")
    trainer = resumed(found, learner)
    assert not trainer.optimiser.state
    assert train(trainer, range(4, 5)) == pytest.approx([1e-2 * 16 / 17])


@pytest.mark.parametrize(
    ("before", "now", "anew"),
    [
        ("adamw_torch", "adamw_torch_fused", False),
        ("adamw_bnb_8bit", "paged_adamw_8bit", False),
        ("adamw_torch", "adamw_bnb_8bit", True),
        ("sgd", "adafactor", True),
        ("muon", "muon", False),
    ],
)
def test_which_optimisers_start_anew(before: str, now: str, anew: bool) -> None:
    assert optimiser.starts_anew(before, now, {}, {}) is anew


# Every argument of an optimiser here that changes what is computed, with another value.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "adamw_torch_fused": {"eps": 1e-6, "amsgrad": True},
    "adamw_torch": {"eps": 1e-6, "amsgrad": True, "foreach": False, "capturable": False, "differentiable": False},
    "adafactor": {
        "eps": (1e-20, 1e-2),
        "clip_threshold": 2.0,
        "decay_rate": -0.7,
        "beta1": 0.9,
        "scale_parameter": True,
        "relative_step": False,
        "warmup_init": False,
    },
    "muon": {"momentum": 0.8, "nesterov": False, "ns_steps": 4, "adjust_lr_fn": "original", "eps": 1e-6},
    "sgd": {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "foreach": False, "differentiable": False},
    "adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-8, "foreach": False},
    "rmsprop": {"alpha": 0.9, "eps": 1e-6, "momentum": 0.9, "centered": True, "foreach": False, "capturable": False},
}
ANEW = {
    *(("adamw_torch_fused", "amsgrad"), ("adamw_torch", "amsgrad"), ("adafactor", "beta1")),
    *(("rmsprop", "momentum"), ("rmsprop", "centered")),
}


@pytest.mark.parametrize("back", [False, True], ids=["added", "left out"])
@pytest.mark.parametrize("optim", [HERE[0], *(pytest.param(optim, marks=pytest.mark.wide) for optim in HERE[1:])])
def test_an_argument_that_changed_is_used_from_the_step_on_and_memory_is_lost_only_where_it_does_not_fit(
    make_policy: MakePolicy, model_path: Path, tmp_path: Path, optim: str, back: bool
) -> None:
    plain = section(optim)
    known = saved_with(plain, make_policy, model_path, tmp_path)
    for name, value in ARGUMENTS[optim].items():
        other = section(optim, optim_args={name: value})
        found, now = (saved_with(other, make_policy, model_path, tmp_path), plain) if back else (known, other)
        trainer = resumed(found, now)
        has = any(isinstance(of, torch.Tensor) for kept in trainer.optimiser.state.values() for of in kept.values())
        anew = (optim, name) in ANEW and not back
        assert (not has or optim == "adagrad") if anew else has or optim == "sgd", name
        before = weights(trainer)
        train(trainer, range(2, 3))
        assert any(not torch.equal(of, before[key]) for key, of in weights(trainer).items()), name


def saved_with(
    learner: LearnerSection, make_policy: MakePolicy, model_path: Path, tmp_path: Path
) -> checkpoint.Checkpoint:
    trainer = PolicyTrainer(make_policy(), learner, 64)
    train(trainer, range(2))
    return saved(trainer, model_path, tmp_path, 2)


def test_one_with_figures_from_the_start_has_them_where_it_starts_anew(
    make_policy: MakePolicy, model_path: Path, tmp_path: Path
) -> None:
    found = saved_with(section("adamw_torch"), make_policy, model_path, tmp_path)
    trainer = resumed(found, section("adagrad", optim_args={"initial_accumulator_value": 0.5}))
    assert {float(kept["sum"].min()) for kept in trainer.optimiser.state.values()} == {0.5}
    train(trainer, range(2, 3))


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(make_policy: MakePolicy) -> None:
    policy = make_policy()
    stepper, _ = optimiser.build_optimiser(policy, section("muon", optim_args={"momentum": 0.8, "eps": 1e-6}))
    assert isinstance(stepper, MuonWithAdamW)
    of_muon = {id(p) for group in stepper.param_groups if "momentum" in group for p in group["params"]}
    for name, parameter in policy.named_parameters():
        wanted = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        assert (id(parameter) in of_muon) is wanted, name
    assert {group["momentum"] for group in stepper.param_groups if "momentum" in group} == {0.8}
    assert {group["eps"] for group in stepper.param_groups if "betas" in group} == {1e-6}


@pytest.mark.parametrize(
    ("learner", "says"),
    [
        ({"optim": "sgd", "optim_args": {"momentun": 0.9}}, r"sgd takes no momentun; it takes momentum, dampening"),
        ({"optim": "sgd", "optim_args": {"nesterov": True}}, r"cannot be made: Nesterov momentum requires"),
        ({"optim_args": {"fused": False}}, "adamw_torch_fused takes no fused"),
        ({"optim": "adamw_bnb_8bit"}, r"learner.optim = adamw_bnb_8bit cannot be used here: .*bitsandbytes"),
        ({"optim": "stable_adamw"}, r"cannot be used here: .*torch-optimi"),
        ({"optim": "adamw_torch_4bit"}, r"cannot be used here: .*torchao"),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_told_with_its_remedy(
    make_policy: MakePolicy, learner: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        optimiser.build_optimiser(make_policy(), LearnerSection(**learner))


class Overrides:
    """bitsandbytes' `GlobalOptimManager`."""

    given: list[tuple[Any, str, dict[str, int]]] = []  # noqa: RUF012

    @classmethod
    def get_instance(cls) -> type[Overrides]:
        return cls

    @classmethod
    def register_module_override(cls, *override: Any) -> None:
        cls.given.append(override)


class AdamWOfBitsAndBytes(torch.optim.AdamW):
    """Takes what bitsandbytes' AdamW takes."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any,
        eps: float,
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        is_paged: bool = False,
        block_wise: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.bits, self.paged, self.block_wise = optim_bits, is_paged, block_wise


def test_8_bits_are_asked_of_bitsandbytes_but_for_embeddings(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in, as bitsandbytes' optimisers step on a GPU only."""
    of_optim = SimpleNamespace(AdamW=AdamWOfBitsAndBytes, Lion=None, RMSprop=None, GlobalOptimManager=Overrides)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=of_optim))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", of_optim)
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: True)
    learner = section("paged_adamw_8bit", optim_args={"block_wise": False})
    with pytest.raises(ConfigError, match=r"paged_adamw_8bit steps on a GPU only.*choose learner.optim = adamw_torch"):
        optimiser.build_optimiser(make_policy(), learner)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    policy = make_policy()
    trainer = PolicyTrainer(policy, learner, 64)
    stepper = trainer.optimiser.optimizer
    assert isinstance(stepper, AdamWOfBitsAndBytes)
    assert (stepper.bits, stepper.paged, stepper.block_wise) == (8, True, False)
    assert Overrides.given == [(policy.model.get_input_embeddings(), "weight", {"optim_bits": 32})]
    assert train(trainer, range(1)) == [pytest.approx(1e-2 / 3)]
