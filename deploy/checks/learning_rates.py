"""Finds a learning rate that is unusual for the size of the model."""

from __future__ import annotations

from slipstream.deploy.servers.model_shape import model_shape
from slipstream.protocol.config import Finding, ModelSection, RunConfig
from slipstream.protocol.config.learning_rates import parameters_by_name, usual_rates

# A rate is far outside from this many times the highest usual one, and below the lowest divided by it.
FAR = 2.0


def parameters_of(model: ModelSection) -> float | None:
    """Return the number of a model's parameters, by its config.json or else by its name; None if neither says it."""
    shape = model_shape(model)
    return parameters_by_name(model.path) if shape is None else float(shape.parameters)


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
