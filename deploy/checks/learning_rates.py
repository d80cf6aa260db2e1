"""Usual learning rates of AdamW by the size of a model. docs/training.md has the same table, and what it rests on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from slipstream.deploy.servers.model_shape import model_shape
from slipstream.protocol.config import Finding, ModelSection, RunConfig

# An adapter takes as many times the rate of all weights.
ADAPTER = 10.0

# A rate is far outside from this many times the highest usual one, and below the lowest divided by it.
FAR = 2.0

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


def parameters_of(model: ModelSection) -> float | None:
    """Return the number of a model's parameters, by its config.json or else by its name; None if neither says it."""
    shape = model_shape(model)
    if shape is not None:
        return float(shape.parameters)
    named = _IN_NAME.search(model.path.rpartition("/")[2])
    return None if named is None else float(named[1]) * _UNITS[named[2].upper()]


def find_unusual_rate(config: RunConfig) -> Finding | None:
    """Find a learning rate that is far from the usual ones for the model's size. Other optimisers than AdamW have other
    rates, of which nothing is known here."""
    if config.learner.script is not None:
        return None  # its optimiser is its own
    parameters = parameters_of(config.model)
    if parameters is None or "adamw" not in config.learner.optim:
        return None
    rate, adapter = config.learner.learning_rate, config.lora.r > 0
    usual = usual_rates(parameters, adapter)
    if usual.lowest / FAR <= rate <= usual.highest * FAR:
        return None
    what = f"an adapter (lora.r = {config.lora.r}) on {described(parameters)}" if adapter else described(parameters)
    does = "destroys the policy in a few steps" if rate > usual.highest else "teaches next to nothing in 50 steps"
    return Finding(
        "warning",
        f"learner.learning_rate = {rate:g} is far outside what is usual for {what}: such a rate {does}",
        f"begin with {usual.first:g}; {usual.lowest:g} to {usual.highest:g} is usual",
    )


def described(parameters: float) -> str:
    """Name a size, such as "135 M parameters"."""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:.3g} {name} parameters"
