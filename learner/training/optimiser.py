"""The optimiser of the weights that train, by transformers' name, and its learning-rate schedule.

A learner may resume with another optimiser or other arguments: those of this start count, and what the old optimiser
remembered is kept where the new one can use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from slipstream.protocol.config import ConfigError, LearnerSection

# The optimiser of checkpoints that do not name one.
DEFAULT = "adamw_torch_fused"

# Optimisers that keep the same state under the same names: one continues where another ended.
_SAME_STATE = (
    {"adamw_torch", "adamw_torch_fused"},
    {"adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"},
    {"lion_8bit", "paged_lion_8bit"},
    {"lion_32bit", "paged_lion_32bit"},
    {"ademamix", "paged_ademamix_32bit"},
    {"ademamix_8bit", "paged_ademamix_8bit"},
    {"rmsprop_bnb", "rmsprop_bnb_32bit"},
)

# Arguments with which an optimiser keeps more state than without them.
_KEEPS_MORE = {
    "adamw_torch": ("amsgrad",),
    "adamw_torch_fused": ("amsgrad",),
    "rmsprop": ("momentum", "centered"),
    "adafactor": ("beta1",),
}

# Arguments that a class may have and that we give it.
_GIVEN = ("self", "params", "optim_bits", "is_paged", "fused")


class Optimiser(NamedTuple):
    """An optimiser and its schedule."""

    stepper: torch.optim.Optimizer
    schedule: LambdaLR


def build_optimiser(model: torch.nn.Module, section: LearnerSection) -> Optimiser:
    """Make the optimiser of the parameters of `model` that train. Weight decay leaves out vectors (norms, biases), as
    is usual.

    Raises:
        ConfigError: The optimiser cannot run here, or does not take its arguments.
    """
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
    return Optimiser(stepper, build_schedule(stepper, section))


def check_optimiser(section: LearnerSection) -> None:
    """Raise `ConfigError` for settings that `build_optimiser` would refuse for any model."""
    kind, _ = _class_of(section)
    _check_arguments(kind, section)
    schedule_factor(section)


def starts_anew(before: str, now: str, then: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Say whether an optimiser can use nothing of another one's state.

    Args:
        before: Name of the optimiser that was saved.
        now: Name of the optimiser that loads.
        then: Arguments of the saved one.
        given: Arguments of the one that loads.
    """
    if before != now and not any({before, now} <= same for same in _SAME_STATE):
        return True
    return any(_is_on(name, given) and not _is_on(name, then) for name in _KEEPS_MORE.get(now, ()))


def _is_on(name: str, arguments: Mapping[str, Any]) -> bool:
    value = arguments.get(name)
    return value is not None if name == "beta1" else bool(value)


def resumed(saved: dict[str, Any], stepper: torch.optim.Optimizer, lr_schedule: LambdaLR, now: str) -> dict[str, Any]:
    """Prepare a trainer's saved state for an optimiser of the name `now`, and its schedule.

    Learning rate, weight decay, all other arguments and the schedule's form are those of this start; the schedule
    continues at its step. An optimiser that `starts_anew` has no memory: its state is None.
    """
    done = saved["schedule"]["last_epoch"]
    rates = [rate * factor(done) for rate, factor in zip(lr_schedule.base_lrs, lr_schedule.lr_lambdas, strict=True)]
    # A schedule saves no functions; the form is that of this start.
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
    """Return the class and its arguments, without the parameters."""
    adamw = {"lr": section.learning_rate, "betas": section.betas}
    if section.optim in ("adamw_torch", "adamw_torch_fused"):
        return AdamW, {**adamw, "fused": True} if section.optim == "adamw_torch_fused" else adamw
    if section.optim == "muon":
        return MuonWithAdamW, adamw
    from transformers import Trainer

    wanted = SimpleNamespace(
        optim=section.optim,
        optim_args=None,
        learning_rate=section.learning_rate,
        adam_beta1=section.betas[0],
        adam_beta2=section.betas[1],
        adam_epsilon=1e-8,
        weight_decay=section.weight_decay,
    )
    try:
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(wanted)
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
    """Return arguments that only this class takes."""
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
    """Do as transformers' Trainer: 8 bits are too few for their uneven gradients (arXiv:2110.02861, section 2.3)."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def build_schedule(stepper: torch.optim.Optimizer, section: LearnerSection) -> LambdaLR:
    """Make the schedule of `learner.lr_scheduler_type`. Raises `ConfigError` for arguments that it refuses."""
    return LambdaLR(stepper, schedule_factor(section))


def schedule_factor(section: LearnerSection) -> Callable[[int], float]:
    """Return the factor of `learner.learning_rate` for an optimiser step by its number, counted from 0.

    transformers warms up from 0, so its first step changes nothing. Here the first step is as long as its second, and
    so on to the end of the warm-up: step i of n uses (i + 1) / n where the warm-up is linear.
    """
    nothing = torch.optim.SGD([torch.zeros(1)], lr=section.learning_rate)
    try:
        theirs: Callable[[int], float] = get_scheduler(
            section.lr_scheduler_type,
            nothing,
            num_warmup_steps=section.warmup_steps,
            num_training_steps=section.steps,
            scheduler_specific_kwargs=dict(section.lr_scheduler_kwargs),
        ).lr_lambdas[0]
        first = theirs(0)
        theirs(section.steps)
    except (TypeError, ValueError, ZeroDivisionError, UnboundLocalError) as error:
        raise ConfigError(
            f"learner.lr_scheduler_type = {section.lr_scheduler_type} with learner.lr_scheduler_kwargs = "
            f"{section.lr_scheduler_kwargs}, learner.steps = {section.steps} and learner.warmup_steps = "
            f"{section.warmup_steps} cannot be made: {error}"
        ) from error

    def factor(step: int) -> float:
        ahead = step < section.warmup_steps and first == 0.0
        return float(theirs(step + 1 if ahead else step))

    return factor


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of the layers and AdamW for the rest, as one optimiser (kellerjordan.github.io/posts/muon).

    AdamW takes embeddings and the output layer, vectors, and tensors of more than two dimensions (fused experts).
    Choose it for training all weights: Muon makes a step of a matrix equally long in every direction. torch's
    `adjust_lr_fn = "match_rms_adamw"` (arXiv:2502.16982, section 2.2) is the default here, so that one learning rate
    suits both.

    Args:
        groups: Parameter groups, each with its weight decay.
        model: The model, whose embeddings and output layer are told apart.
        betas: AdamW's.
        momentum: Muon's, as are `nesterov`, `ns_steps` and `adjust_lr_fn`.
        eps: AdamW's.

    Raises:
        ValueError: No matrix of a layer trains.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        model: torch.nn.Module,
        lr: float,
        betas: tuple[float, float],
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        eps: float = 1e-8,
    ) -> None:
        apart = _words_of(model)
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            for split, wanted in ((matrices, True), (others, False)):
                params = [p for p in group["params"] if (p.ndim == 2 and id(p) not in apart) is wanted]
                if params:
                    split.append({**group, "params": params})
        if not matrices:
            raise ValueError("no matrix of a layer trains; choose learner.optim = adamw_torch_fused")
        self._parts: list[Optimizer] = [
            Muon(
                matrices,
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            )
        ]
        if others:
            self._parts.append(AdamW(others, lr=lr, betas=betas, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("MuonWithAdamW.step() takes no closure")
        rest = iter(self.param_groups)
        for part in self._parts:
            # Loading a state replaces groups and state.
            part.param_groups = [next(rest) for _ in part.param_groups]
            part.state = self.state
            part.step()


def _words_of(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings and output layer."""
    network: Any = getattr(model, "model", model)
    layers = (network.get_input_embeddings(), network.get_output_embeddings())
    return {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
