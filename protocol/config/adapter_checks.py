"""Checks that an adapter and a quantised base fit the rest of the run file."""

from __future__ import annotations

import re
from typing import Literal

from slipstream.protocol.config.checks import Finding
from slipstream.protocol.config.sections import LearnerSection, LoraSection, ModelSection, WeightSyncSection
from slipstream.protocol.config.sections.base import toml_value

# A learning rate too low for an adapter, which starts at zero and is far smaller than the full weights.
_LITTLE = 5e-6

# Words that `lora.target_modules` may be, next to a list or an expression.
_KINDS = ("all-linear", "auto")

AdapterOnly = bool | Literal["auto"]

# Ranks that vLLM accepts for `--max-lora-rank` (vllm 0.32, `MaxLoRARanks`).
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_WITH_FOUR_BITS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def check_adapter(
    model: ModelSection, learner: LearnerSection, lora: LoraSection, weight_sync: WeightSyncSection | None = None
) -> None:
    """Check the settings of adapter and quantised base. Raises `ValueError`."""
    _check_quantised(model, lora)
    if weight_sync is not None:
        _check_published_alone(weight_sync, model, lora)
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
    """Return the expression by which peft matches a key of `rank_pattern` or `alpha_pattern` with names of layers
    (`peft.utils.other.get_pattern_key`)."""
    return rf"(.*\.)?({key})$"


def unservable(model: ModelSection, lora: LoraSection) -> str | None:
    """Return the setting for which vLLM cannot serve this adapter next to its base; None if it can."""
    if model.quantised_bits:
        # The learner's base has the quantised values, the server's those of the checkpoint.
        return f"model.load_in_{model.quantised_bits}bit = true"
    if lora.use_dora:
        return "lora.use_dora = true"
    if lora.bias != "none":
        return f"lora.bias = {lora.bias}"
    if lora.modules_to_save:
        return f"lora.modules_to_save = {toml_value(lora.modules_to_save)}"
    if (rank := max_adapter_rank(lora)) > SERVED_RANKS[-1]:
        return f"a rank of {rank}, above {SERVED_RANKS[-1]}"
    return None


def max_adapter_rank(lora: LoraSection) -> int:
    return max([lora.r, *lora.rank_pattern.values()])


def is_adapter_published_alone(adapter_only: AdapterOnly, model: ModelSection, lora: LoraSection, on_gpu: bool) -> bool:
    """Tell whether versions are published as adapters instead of merged weights.

    Args:
        adapter_only: `weight_sync.adapter_only`.
        on_gpu: Whether the caller's part of the run, servers or learner, is on GPUs. If the two parts differ, the
            first publication says so.
    """
    if not lora.r or adapter_only is False:
        return False
    return adapter_only is True or (on_gpu and unservable(model, lora) is None)


def merged_adapter_message(adapter_only: AdapterOnly, model: ModelSection, lora: LoraSection, on_gpu: bool) -> str:
    """Explain why an adapter is published merged; "" if it is not."""
    reason = unservable(model, lora)
    if not lora.r or adapter_only != "auto" or not on_gpu or reason is None:
        return ""
    return f"{reason}: vLLM serves no such adapter, so the merged weights are published"


def _check_published_alone(weight_sync: WeightSyncSection, model: ModelSection, lora: LoraSection) -> None:
    if weight_sync.adapter_only is not True:
        return
    if not lora.r:
        raise ValueError(
            "weight_sync.adapter_only = true without an adapter: set lora.r, to 16 for example, or leave it out"
        )
    if (reason := unservable(model, lora)) is not None:
        raise ValueError(
            f"weight_sync.adapter_only = true with {reason}: vLLM serves no such adapter; set weight_sync.adapter_only "
            f"= false, which has the merged weights published"
        )
    if weight_sync.delta:
        raise ValueError(
            "weight_sync.delta = true with weight_sync.adapter_only = true: an adapter is small and always sent "
            "whole, so delta would do nothing; leave weight_sync.delta out"
        )


def find_adapter_warnings(learner: LearnerSection, lora: LoraSection) -> list[Finding]:
    """Find a learning rate that is valid but too low for an adapter to learn."""
    if not lora.r or learner.learning_rate >= _LITTLE:
        return []
    text = (
        f"learner.learning_rate = {learner.learning_rate:g} with lora.r = {lora.r}: an adapter learns next to nothing "
        f"from steps that are right for all weights"
    )
    return [Finding("warning", text, "1e-5 to 2e-4 is usual")]


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
            f"model.load_in_{bits}bit = true without an adapter: weights of {bits} bits cannot be trained; set "
            f"lora.r, to 16 for example, or leave it out"
        )
