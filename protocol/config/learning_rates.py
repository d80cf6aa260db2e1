"""Usual learning rates of AdamW by the size of a model. docs/training.md has the same table, and what it rests on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from slipstream.protocol.config import RunConfig

# An adapter takes as many times the rate of all weights.
ADAPTER = 10.0

# Learning from demonstrations takes as many times the rate of RL.
SUPERVISED = 5.0

# The rate for demonstrations of a model whose size is not known: that of TRL's SFTConfig.
SUPERVISED_UNKNOWN = 2e-5

# After an update that destroyed the policy, the rate is divided by this.
LOWER = 10.0

# The number of parameters in a model's name, such as "Qwen3-0.6B" or "SmolLM2-135M-Instruct".
_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([MB])(?![A-Za-z0-9])", re.IGNORECASE)

_UNITS = {"M": 1e6, "B": 1e9}


@dataclass(frozen=True)
class UsualRates:
    """Rates for models of at most `parameters`: from `lowest` to `highest`, and the one to begin with."""

    parameters: float
    lowest: float
    first: float
    highest: float

    def scaled(self, factor: float) -> UsualRates:
        return UsualRates(self.parameters, self.lowest * factor, self.first * factor, self.highest * factor)


TABLE = (
    UsualRates(10e6, 1e-4, 4e-4, 1e-3),
    UsualRates(300e6, 1e-5, 2e-5, 5e-5),
    UsualRates(800e6, 2e-6, 5e-6, 2e-5),
    UsualRates(5e9, 1e-6, 2e-6, 1e-5),
    UsualRates(inf, 5e-7, 1e-6, 5e-6),
)


def usual_rates(parameters: float, adapter: bool = False) -> UsualRates:
    """Return the usual rates for a model of so many parameters. `adapter`: for LoRA."""
    found = next(row for row in TABLE if parameters <= row.parameters)
    return found.scaled(ADAPTER) if adapter else found


def supervised_rate(parameters: float | None, adapter: bool = False) -> float:
    """Return the rate to begin with for demonstrations. `adapter`: for LoRA."""
    if parameters is None:
        return SUPERVISED_UNKNOWN * (ADAPTER if adapter else 1.0)
    return SUPERVISED * usual_rates(parameters, adapter).first


def parameters_by_name(path: str) -> float | None:
    """Return the number of a model's parameters by its name; None if that does not say it."""
    named = _IN_NAME.search(path.rstrip("/").rpartition("/")[2])
    return None if named is None else float(named[1]) * _UNITS[named[2].upper()]


def lower_rate(config: RunConfig) -> float:
    """Return the learning rate to try after one that destroyed the policy: a tenth, or the one to begin with for the
    model's size where a tenth is still unusual."""
    lower = config.learner.learning_rate / LOWER
    parameters = parameters_by_name(config.model.path)
    if parameters is None or "adamw" not in config.learner.optim:
        return lower
    usual = usual_rates(parameters, config.lora.r > 0)
    return lower if lower <= usual.highest else usual.first
