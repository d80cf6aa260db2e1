"""How the learning rate goes over a run: transformers' schedules, but for a first step that would change nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from protocol.config import ConfigError, LearnerSection


def build(stepper: torch.optim.Optimizer, section: LearnerSection) -> LambdaLR:
    """Raises `ConfigError` for arguments that the schedule refuses."""
    return LambdaLR(stepper, factor_of(section))


def factor_of(section: LearnerSection) -> Callable[[int], float]:
    """The share of `section.learning_rate` that the optimiser step of a number, counted from 0, uses.

    transformers warms up from 0, so that its first step changes nothing. Here it is as long as its second, and so on to
    the end of the warm-up: step i of n takes (i + 1) / n where the warm-up is linear.
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
