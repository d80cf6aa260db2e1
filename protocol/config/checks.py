"""Whether the settings of optimiser and schedule fit together: what transformers would take without a word, or refuse
only when the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from protocol.config.sections import LearnerSection
from protocol.config.sections.base import toml_value
from protocol.config.sections.optimiser import SHARDED

# The arguments that each of transformers' schedules takes (`transformers.optimization`).
SCHEDULE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}

# Of each schedule that has such, the arguments of which it needs one and no more.
_ONE_OF: Mapping[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr_rate", "min_lr"),
    "cosine_warmup_with_min_lr": ("min_lr_rate", "min_lr"),
    "warmup_stable_decay": ("num_decay_steps",),
}

# Arguments of optimisers that have a setting of their own.
_OWN_SETTING = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas"}


def check_optimisation(learner: LearnerSection) -> None:
    """Raises `ValueError`."""
    _check_schedule(learner)
    if learner.shard_weights:
        check_sharded_optimisation(learner)
    for name, own in _OWN_SETTING.items():
        # AdEMAMix has three of them, and the setting takes two.
        if name in learner.optim_args and not (name == "betas" and "ademamix" in learner.optim):
            raise ValueError(
                f"learner.optim_args = {toml_value(learner.optim_args)}: {name} has a setting of its own; set "
                f"learner.{own}"
            )


def check_sharded_optimisation(learner: LearnerSection) -> None:
    """Of weights that ranks share out. Raises `ValueError`."""
    if learner.optim not in SHARDED:
        raise ValueError(
            f"learner.optim = {learner.optim} with learner.shard_weights = true: it is not known to step on weights "
            f"that ranks share out; choose one of {', '.join(sorted(SHARDED))}, or leave learner.shard_weights out"
        )


def _check_schedule(learner: LearnerSection) -> None:
    kind, given = learner.lr_scheduler_type, learner.lr_scheduler_kwargs
    said = f"learner.lr_scheduler_kwargs = {toml_value(given)}"
    known = SCHEDULE_ARGUMENTS[kind]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(
                f"{said}: learner.lr_scheduler_type = {kind} has no argument {name}; "
                f"{f'did you mean {close[0]}?' if close else takes}"
            )
    needed = _ONE_OF.get(kind, ())
    found = [name for name in needed if name in given]
    if needed and len(found) != 1:
        raise ValueError(
            f"{said}: learner.lr_scheduler_type = {kind} needs {' or '.join(needed)}"
            f"{', not both' if len(found) > 1 else ''}; write lr_scheduler_kwargs = "
            f"{{{needed[0]} = {'0.1' if 'rate' in needed[0] else '10'}}}"
        )
    if kind == "constant" and learner.warmup_steps:
        raise ValueError(
            f"learner.warmup_steps = {learner.warmup_steps} does nothing with learner.lr_scheduler_type = constant: "
            f"leave it out, or set learner.lr_scheduler_type = constant_with_warmup"
        )
