"""`learner.epochs` in place of `learner.steps`: how many steps they are, once the data set is known."""

from __future__ import annotations

import math
from fractions import Fraction

from protocol.config import ConfigError, RunConfig


def steps_of(epochs: float, rows: int, groups_per_step: int) -> int:
    """Optimiser steps in which `rows` are trained on `epochs` times, rounded up; one row is one group."""
    return math.ceil(Fraction(repr(epochs)) * rows / groups_per_step)


def in_steps(config: RunConfig, rows: int | None) -> RunConfig:
    """`config` with `learner.steps` for its `learner.epochs`; as it is without. `rows`: of the data set, None where
    their number is not known. Raises `ConfigError` then."""
    learner = config.learner
    if learner.epochs is None:
        return config
    if rows is None:
        raise ConfigError(
            f"learner.epochs = {learner.epochs:g}: the data set is an iterable, whose number of rows is not known; "
            f"give learner.steps instead"
        )
    steps = steps_of(learner.epochs, rows, learner.groups_per_step)
    return config.model_copy(update={"learner": learner.model_copy(update={"steps": steps, "epochs": None})})


def told(config: RunConfig, rows: int) -> str:
    """How the steps of `config` come about."""
    learner = in_steps(config, rows).learner
    return (
        f"learner.epochs = {config.learner.epochs:g}: {rows} rows in steps of {learner.groups_per_step} groups are "
        f"{learner.steps} steps"
    )
