"""The optimiser of the weights that train, by transformers' name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from learner import schedule
from learner.muon import MuonWithAdamW
from protocol.config import ConfigError, LearnerSection

# What checkpoints were made with that do not name it.
DEFAULT = "adamw_torch_fused"

# Optimisers that keep the same figures under the same names: one goes on where another ended.
_SAME_STATE = (
    {"adamw_torch", "adamw_torch_fused"},
    {"adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"},
    {"lion_8bit", "paged_lion_8bit"},
    {"lion_32bit", "paged_lion_32bit"},
    {"ademamix", "paged_ademamix_32bit"},
    {"ademamix_8bit", "paged_ademamix_8bit"},
    {"rmsprop_bnb", "rmsprop_bnb_32bit"},
)

# Arguments with which an optimiser keeps figures, beside those that it keeps without them.
_KEEPS_MORE = {
    "adamw_torch": ("amsgrad",),
    "adamw_torch_fused": ("amsgrad",),
    "rmsprop": ("momentum", "centered"),
    "adafactor": ("beta1",),
}

# Arguments that a class may have and that are given to it already.
_GIVEN = ("self", "params", "optim_bits", "is_paged", "fused")


class Optimiser(NamedTuple):
    stepper: torch.optim.Optimizer
    schedule: LambdaLR


def build_optimiser(model: torch.nn.Module, section: LearnerSection) -> Optimiser:
    """Of the parameters of `model` that train. Weight decay leaves out vectors (norms, biases), as is usual. Raises
    `ConfigError` for an optimiser that cannot run here, and for arguments that it does not take."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kind, arguments = _class_of(section)
    _check_arguments(kind, section)
    try:
        stepper = kind(groups, **{**arguments, **section.optim_args}, **_needs(kind, model))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"learner.optim = {section.optim} with learner.optim_args = {section.optim_args} cannot be made: {error}"
        ) from error
    if arguments.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    return Optimiser(stepper, schedule.build(stepper, section))


def check(section: LearnerSection) -> None:
    """Raise `ConfigError` for what `build` would refuse whatever the model."""
    kind, _ = _class_of(section)
    _check_arguments(kind, section)
    schedule.factor_of(section)


def starts_anew(before: str, now: str, then: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether an optimiser of the name `now` with the arguments `given` can make nothing of what one of the name
    `before` kept, which had the arguments `then`."""
    if before != now and not any({before, now} <= same for same in _SAME_STATE):
        return True
    return any(_is_on(name, given) and not _is_on(name, then) for name in _KEEPS_MORE.get(now, ()))


def _is_on(name: str, arguments: Mapping[str, Any]) -> bool:
    value = arguments.get(name)
    return value is not None if name == "beta1" else bool(value)


def resumed(saved: dict[str, Any], stepper: torch.optim.Optimizer, lr_schedule: LambdaLR, now: str) -> dict[str, Any]:
    """A trainer's saved state, as it is to be loaded into an optimiser of the name `now`, and its schedule.

    Learning rate, weight decay, all other arguments and the schedule's form are those of this start; the schedule goes
    on at its step. An optimiser that `starts_anew` has no memory: its state is None.
    """
    done = saved["schedule"]["last_epoch"]
    rates = [rate * factor(done) for rate, factor in zip(lr_schedule.base_lrs, lr_schedule.lr_lambdas, strict=True)]
    # Functions are not saved: what stands there is of schedules that were objects.
    of_schedule = lr_schedule.state_dict() | {"last_epoch": done, "_step_count": done + 1, "_last_lr": rates}
    before, then = saved.get("optim", DEFAULT), saved["optimiser"]["param_groups"][0]
    kept = saved["optimiser"]
    if starts_anew(before, now, then, stepper.param_groups[0]):
        kept = {"state": None, "param_groups": stepper.state_dict()["param_groups"]}
    groups = [
        {**group, **{name: value for name, value in own.items() if name != "params"}, "lr": rate}
        for group, own, rate in zip(kept["param_groups"], stepper.param_groups, rates, strict=True)
    ]
    return {**saved, "optimiser": {**kept, "param_groups": groups}, "schedule": of_schedule}


def _class_of(section: LearnerSection) -> tuple[Any, dict[str, Any]]:
    """The class and its arguments, without the parameters."""
    adamw = {"lr": section.learning_rate, "betas": section.betas}
    if section.optim in ("adamw_torch", "adamw_torch_fused"):
        return AdamW, {**adamw, "fused": True} if section.optim == "adamw_torch_fused" else adamw
    if section.optim == "muon":
        return MuonWithAdamW, adamw
    from transformers import Trainer

    told = SimpleNamespace(
        optim=section.optim,
        optim_args=None,
        learning_rate=section.learning_rate,
        adam_beta1=section.betas[0],
        adam_beta2=section.betas[1],
        adam_epsilon=1e-8,
        weight_decay=section.weight_decay,
    )
    try:
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(told)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"learner.optim = {section.optim} cannot be used here: {' '.join(str(error).split())}; or choose "
            f"learner.optim = {DEFAULT}"
        ) from error
    if kind.__module__.startswith("bitsandbytes") and not torch.accelerator.is_available():
        raise ConfigError(
            f"learner.optim = {section.optim} steps on a GPU only, and torch finds none here: choose learner.optim = "
            f"{DEFAULT}, or adafactor, which keeps as little"
        )
    return kind, arguments


def _needs(kind: Any, model: torch.nn.Module) -> dict[str, Any]:
    """What only this class is given."""
    return {"model": model} if kind is MuonWithAdamW else {}


def _check_arguments(kind: Any, section: LearnerSection) -> None:
    taken = [name for name in inspect.signature(kind.__init__).parameters if name not in _GIVEN]
    for name in section.optim_args:
        if name not in taken:
            free = ", ".join(each for each in taken if each not in ("lr", "betas", "weight_decay", "model"))
            raise ConfigError(
                f"learner.optim_args = {section.optim_args}: learner.optim = {section.optim} takes no {name}; it takes "
                f"{free}"
            )


def _keep_embeddings_in_32_bits(model: torch.nn.Module) -> None:
    """As transformers' Trainer does: 8 bits are too few for their uneven gradients (arXiv:2110.02861, section 2.3)."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
