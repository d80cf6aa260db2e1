"""Whether an adapter and a quantised base fit with the rest of the run file."""

from __future__ import annotations

import re

from protocol.config.sections import LearnerSection, LoraSection, ModelSection
from protocol.config.sections.base import toml_value

# An adapter starts at nothing and is far smaller than the weights that it stands for.
_LITTLE = 5e-6
# What `lora.target_modules` may be beside a list and an expression.
_KINDS = ("all-linear", "auto")
_WITH_FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def check(model: ModelSection, learner: LearnerSection, lora: LoraSection) -> None:
    """Raises `ValueError`."""
    _check_quantised(model, lora)
    if not lora.r:
        for name, field in LoraSection.model_fields.items():
            if name != "r" and getattr(lora, name) != field.default:
                raise ValueError(
                    f"lora.{name} = {toml_value(getattr(lora, name))} does nothing without lora.r: set lora.r, to 16 "
                    f"for example, or leave it out"
                )
        return
    _check_names(lora)
    if learner.weights_dtype == "model":
        raise ValueError(
            f"learner.weights_dtype = model with lora.r = {lora.r}: the base is kept in model.dtype anyway, and small "
            f"steps of the adapter would be lost in rounding; leave learner.weights_dtype out"
        )
    if learner.shard_weights:
        raise ValueError(
            f"learner.shard_weights = true with lora.r = {lora.r}: an adapter is small, and its base is not shared "
            f"out; leave learner.shard_weights out, or train all weights, without lora.r"
        )
    if learner.reference_sync_steps:
        raise ValueError(
            f"learner.reference_sync_steps = {learner.reference_sync_steps} with lora.r = {lora.r}: the reference is "
            f"the base itself, without the adapter, and cannot follow; leave learner.reference_sync_steps out, or "
            f"train all weights, without lora.r"
        )
    if learner.kl_coef and lora.bias != "none":
        raise ValueError(
            f"learner.kl_coef = {learner.kl_coef:g} with lora.bias = {lora.bias}: the reference is the model without "
            f"the adapter, and the biases that trained would be a part of it; set lora.bias = none"
        )


def _check_names(lora: LoraSection) -> None:
    is_expression = isinstance(lora.target_modules, str) and lora.target_modules not in _KINDS
    if is_expression and lora.layers_to_transform:
        raise ValueError(
            f"lora.layers_to_transform = {toml_value(lora.layers_to_transform)} with lora.target_modules = "
            f"{toml_value(lora.target_modules)}, an expression of whole names: write the numbers of the layers into "
            f"it, or name the linear layers in a list"
        )
    found = {"target_modules": [(lora.target_modules, str(lora.target_modules))] if is_expression else []}
    found |= {
        name: [(key, pattern_of(key)) for key in getattr(lora, name)] for name in ("rank_pattern", "alpha_pattern")
    }
    for name, expressions in found.items():
        for expression, compared in expressions:
            try:
                re.compile(compared)
            except re.error as error:
                raise ValueError(
                    f"lora.{name} = {toml_value(getattr(lora, name))}: {expression} is not a regular expression: "
                    f"{error}; write a layer's name, such as q_proj"
                ) from error


def pattern_of(key: str) -> str:
    """The expression by which peft compares a key of `rank_pattern` and `alpha_pattern` with the names of layers
    (`peft.utils.other.get_pattern_key`)."""
    return rf"(.*\.)?({key})$"


def doubts(learner: LearnerSection, lora: LoraSection) -> list[str]:
    """What may be meant, but hardly is."""
    if not lora.r or learner.learning_rate >= _LITTLE:
        return []
    return [
        f"learner.learning_rate = {learner.learning_rate:g} with lora.r = {lora.r}: an adapter learns next to nothing "
        f"from steps that are right for all weights; 1e-5 to 2e-4 is usual"
    ]


def _check_quantised(model: ModelSection, lora: LoraSection) -> None:
    if model.load_in_4bit and model.load_in_8bit:
        raise ValueError("model.load_in_4bit and model.load_in_8bit are both true: leave one of them out")
    for name in _WITH_FOUR_BITS:
        if not model.load_in_4bit and getattr(model, name) != ModelSection.model_fields[name].default:
            raise ValueError(
                f"model.{name} = {toml_value(getattr(model, name))} does nothing without model.load_in_4bit: leave it "
                f"out, or set model.load_in_4bit = true"
            )
    if (bits := model.quantised_bits) and not lora.r:
        raise ValueError(
            f"model.load_in_{bits}bit = true without an adapter: weights of {bits} bits cannot train; set lora.r, to "
            f"16 for example, or leave it out"
        )
