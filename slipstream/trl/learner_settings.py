"""Translates the learning part of a TRL config into settings: objective, optimiser, schedule, adapter, quantised base.

Pure: objects of peft and transformers are read, but neither is imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import ValidationError

from slipstream.protocol.config import ConfigError, LoraSection, ModelSection
from slipstream.protocol.config.checks import READERS
from slipstream.trl.configs import AsyncGRPOConfig, RLOOConfig, _Config
from slipstream.trl.fields import FIELDS, TABLES

# Preset and normaliser of each `loss_type`.
_PRESETS = {
    "grpo": ("grpo", "sequences"),
    "bnpo": ("bnpo", "tokens"),
    "dr_grpo": ("dr_grpo", "constant"),
    "dapo": ("dapo", "tokens"),
    "luspo": ("luspo", "rollouts"),
    "cispo": ("cispo", "tokens"),
    "sapo": ("sapo", "sequences"),
    "vespo": ("vespo", "tokens"),
}

_OWN_OBJECTIVE = ("cispo", "sapo", "vespo")

_ADVANTAGES = {"group": "grpo", True: "grpo", "batch": "batch", "none": "dr_grpo", False: "dr_grpo"}

_SAMPLING = "vllm_importance_sampling_"

# `correction_high` in place of a bound that is None: no ratio is above it.
_UNBOUNDED = 1e6


def learner_settings(config: _Config, notes: list[str]) -> dict[str, Any]:
    """Translate the objective of a config into settings of [learner].

    Args:
        config: The script's config.
        notes: Takes sentences for the script's reader.

    Raises:
        ConfigError: A field has no setting here.
    """
    if "algorithm" in config.slipstream.get("learner", {}):
        _refuse_both(config)
        return {}
    settings = _chosen(config, notes)
    settings |= _bounds(config, settings["algorithm"], notes)
    settings |= _reference(config)
    if settings["objective"] in READERS["delta"]["objective"]:
        delta = config.field("delta")
        settings["delta"] = "none" if delta is None else number(config, "delta")
        if delta is None:
            notes.append(
                "as in TRL, no bound holds the ratio of bad tokens; where data is stale, one that has moved far may "
                f"decide a step: {type(config).__name__}(slipstream={{'learner': {{'delta': 4.0}}}}) bounds it"
            )
    for name in ("top_entropy_quantile", "entropy_coef", "off_policy_mask_threshold", "normalize_advantages"):
        if config.field(name) is not None:
            settings[name.replace("normalize", "normalise")] = config.field(name)
    if config.field("reward_clip_range") is not None:
        settings["reward_clip"] = list(config.field("reward_clip_range"))
    return settings


def _chosen(config: _Config, notes: list[str]) -> dict[str, Any]:
    """Return the preset, and the parts of the algorithm that the config may choose differently from it."""
    if isinstance(config, RLOOConfig):
        return {"algorithm": "rloo", "objective": "sequence_clip"}
    if isinstance(config, AsyncGRPOConfig):
        return {"algorithm": "async_grpo", "objective": "ppo_clip"}
    loss, sequence = config.field("loss_type"), config.field("importance_sampling_level") == "sequence"
    algorithm, normaliser = _PRESETS[loss]
    if loss in ("sapo", "vespo") and sequence:
        raise ConfigError(
            f"{type(config).__name__}(importance_sampling_level='sequence') is not supported with loss_type={loss!r}, "
            f"which has its own ratio: leave it out"
        )
    if loss == "bnpo":
        notes.append("loss_type='bnpo' divides by the tokens of the whole step, as dapo does, not of a micro-batch")
    if sequence and loss not in ("grpo", "cispo"):
        notes.append(
            f"importance_sampling_level='sequence' with loss_type={loss!r}: as in TRL each sequence counts by its "
            f"length; GSPO as in its paper is loss_type='grpo'"
        )
    of_tokens = loss if loss in _OWN_OBJECTIVE else "ppo_clip"
    of_sequences = "sequence_cispo" if loss == "cispo" else "gspo"
    together = config.field("multi_objective_aggregation") == "normalize_then_sum"
    return {
        "algorithm": "gspo" if loss == "grpo" and sequence else algorithm,
        "advantage": "gdpo" if together else _ADVANTAGES[config.field("scale_rewards")],
        "objective": of_sequences if sequence else of_tokens,
        "normaliser": normaliser,
        **_own(config, loss),
        **_correction(config, loss, notes),
    }


def _own(config: _Config, loss: str) -> dict[str, Any]:
    """Return the fields whose names begin with the objective's, which are its settings here too."""
    return {name: value for name, value in config.given.items() if name.startswith(f"{loss}_") and value is not None}


def _bounds(config: _Config, algorithm: str, notes: list[str]) -> dict[str, Any]:
    low, high = number(config, "epsilon"), number(config, "epsilon_high")
    high = low if high is None else high
    if algorithm == "cispo":
        if high <= 0:
            raise ConfigError(
                f"{type(config).__name__}(loss_type='cispo', epsilon_high={high:g}): epsilon_high is the greatest "
                f"ratio there, and must be above 0; write epsilon_high=5.0"
            )
        if high <= 1:
            notes.append(
                f"loss_type='cispo' with epsilon_high={high:g}: as in TRL that is the greatest ratio itself, so each "
                f"token of the policy that samples counts {high:g}; the usual is epsilon_high=5.0"
            )
        return {"clip_high": high - 1}
    return {} if algorithm in _OWN_OBJECTIVE else {"clip_low": low, "clip_high": high}


def _correction(config: _Config, loss: str, notes: list[str]) -> dict[str, Any]:
    """Return the correction. TRL weights by the ratio of trainer and sampler if vLLM samples.

    With one optimiser step for each batch, the trainer at generation is the policy that trains, which is
    `proximal = "recomputed"` here.
    """
    given = {name for name in config.given if name.startswith(_SAMPLING) and config.given[name] is not None}
    wanted = config.field(f"{_SAMPLING}correction") and (config.field("use_vllm") or given)
    if not wanted or loss == "vespo":  # whose kernel has the ratio to the sampler in it
        return {"correction": "none"}
    mode, low = config.field(f"{_SAMPLING}mode"), number(config, f"{_SAMPLING}clip_min")
    name = f"{_SAMPLING}cap" if config.field(f"{_SAMPLING}cap") is not None else f"{_SAMPLING}clip_max"
    high = number(config, name)
    if high is not None and high < 1:
        raise ConfigError(f"{type(config).__name__}({name}={high:g}) would weigh every token down: give 1 or more")
    if low is not None and low > 1:
        raise ConfigError(
            f"{type(config).__name__}({_SAMPLING}clip_min={low:g}) would weigh every token up: give 1 or less"
        )
    notes.append(
        f"as TRL with vLLM, each token's loss is weighted by the ratio of learner and sampler ({mode}), and the ratio "
        f"that is clipped is 1; on tokens of older versions that leaves out or cuts down much: {_SAMPLING}correction="
        f"False clips the ratio to the sampler instead"
    )
    return {"correction": mode, "correction_low": low or 0.0, "correction_high": _UNBOUNDED if high is None else high}


def _reference(config: _Config) -> dict[str, Any]:
    beta, follows = number(config, "beta") or 0.0, config.field("sync_ref_model")
    if not beta:
        if follows:
            raise ConfigError(
                f"{type(config).__name__}(sync_ref_model=True) with beta=0.0 has no reference model to move: set beta, "
                f"or leave it out"
            )
        return {"kl_coef": 0.0}
    settings: dict[str, Any] = {"kl_coef": beta}
    if config.field("use_bias_correction_kl") is not None:
        settings["kl_bias_correction"] = config.field("use_bias_correction_kl")
    if follows:
        settings["reference_sync_steps"] = number(config, "ref_model_sync_steps")
        settings["reference_mixup"] = number(config, "ref_model_mixup_alpha")
    return settings


def _refuse_both(config: _Config) -> None:
    chosen = config.slipstream["learner"]["algorithm"]
    both = [field.name for field in TABLES["The objective"] if field.how == "worked" and _shapes(config, field.name)]
    if both:
        raise ConfigError(
            f"{type(config).__name__}({both[0]}={config.given[both[0]]!r}) next to slipstream={{'learner': "
            f"{{'algorithm': {chosen!r}}}}}: both choose the objective; leave {both[0]} out, or write what it means "
            f"into slipstream"
        )


def _shapes(config: _Config, name: str) -> bool:
    return config.given.get(name) is not None and "learner." in FIELDS[name].here and not name.startswith("lr_")


def number(config: _Config, name: str) -> Any:
    """Return a number, None if it is neither given nor has a default. Raises `ConfigError` for another type."""
    value = config.field(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{type(config).__name__}({name}={value!r}): must be a number")
    return value


def whole(config: _Config, name: str) -> Any:
    """Return a number without a fraction, None as `number`. Raises `ConfigError` for another one."""
    value = number(config, name)
    if value is not None and value != int(value):
        raise ConfigError(f"{type(config).__name__}({name}={value!r}): must be a whole number")
    return None if value is None else int(value)


def truth(config: _Config, name: str) -> bool:
    """Return a switch, False if it is left out. Raises `ConfigError` for a value that is neither True nor False."""
    value = config.field(name)
    if value not in (None, True, False):
        raise ConfigError(f"{type(config).__name__}({name}={value!r}): write True or False")
    return bool(value)


_EPSILON = 1e-8

# Fields of peft's LoraConfig that do not change what is trained.
_OF_PEFT = (
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config"),
)

_OF_BITSANDBYTES = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def optimiser_settings(config: _Config, steps: int | None, notes: list[str]) -> dict[str, Any]:
    """Translate optimiser and schedule into settings of [learner].

    Args:
        config: The script's config.
        steps: Optimiser steps of the run; None if they are not known yet.
        notes: Takes sentences for the script's reader.

    Raises:
        ConfigError: A field has no setting here.
    """
    settings: dict[str, Any] = {"betas": [number(config, "adam_beta1"), number(config, "adam_beta2")]}
    arguments = _arguments(config)
    if (epsilon := number(config, "adam_epsilon")) not in (None, _EPSILON):
        arguments["eps"] = float(epsilon)
    if arguments:
        settings["optim_args"] = arguments
    warmup = number(config, "warmup_steps")
    if 0 < warmup < 1:
        if steps is None or steps < 1:
            raise ConfigError(f"warmup_steps={warmup} is a share of the steps, and max_steps is not given; give it")
        warmup = math.ceil(warmup * steps)
    kind = config.field("lr_scheduler_type")
    kind = kind.value if isinstance(kind, Enum) else kind
    if kind == "constant" and warmup:
        notes.append(
            f"warmup_steps={config.field('warmup_steps')!r} has no effect with lr_scheduler_type='constant', as in "
            f"TRL; write lr_scheduler_type='constant_with_warmup'"
        )
        warmup = 0
    settings |= {"warmup_steps": int(warmup), "lr_scheduler_type": kind}
    if more := _schedule_arguments(config):
        settings["lr_scheduler_kwargs"] = more
    return settings


def lora_settings(given: Any, kind: str) -> dict[str, Any]:
    """Translate a trainer's `peft_config` into settings of [lora].

    Args:
        given: The `peft_config`.
        kind: Name of the trainer's class, for messages.

    Raises:
        ConfigError: The adapter is not LoRA, or a field has no setting here.
    """
    type_of_it = getattr(given, "peft_type", None)
    name = type_of_it.value if isinstance(type_of_it, Enum) else type_of_it
    if name != "LORA" or not dataclasses.is_dataclass(given):
        config = f"{kind.removesuffix('Trainer')}Config"
        raise ConfigError(
            f"{kind}(peft_config={type(given).__name__}) is not supported: the adapter is LoRA; give a "
            f"peft.LoraConfig, or set [lora] with {config}(slipstream={{'lora': {{'r': 16}}}})"
        )
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name in LoraSection.model_fields:
            if value is not None:
                settings[field.name] = sorted(value) if isinstance(value, set) else value
        elif field.name not in _OF_PEFT and value != default:
            raise ConfigError(f"{kind}(peft_config=...): {field.name} = {value!r} is not supported; leave it out")
    if settings.get("lora_dropout"):
        raise ConfigError(
            f"{kind}(peft_config=...): lora_dropout = {settings['lora_dropout']:g} is not supported: with dropout the "
            f"policy's log-probs would not be the sampler's; write lora_dropout=0.0"
        )
    settings.setdefault("target_modules", "auto")
    if isinstance(layers := settings.get("layers_to_transform"), int):
        settings["layers_to_transform"] = [layers]
    if isinstance(excluded := settings.get("exclude_modules"), str):
        settings["exclude_modules"] = [excluded]
    try:
        LoraSection.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{kind}(peft_config=...): {'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"
        ) from None
    return settings


def quantisation_settings(given: Any, kind: str) -> dict[str, Any]:
    """Translate a trainer's `quantization_config` into settings of [model].

    Raises:
        ConfigError: It is not a BitsAndBytesConfig.
    """
    if type(given).__name__ != "BitsAndBytesConfig":
        raise ConfigError(
            f"{kind}(quantization_config={type(given).__name__}) is not supported; give a BitsAndBytesConfig, or leave "
            f"it out"
        )
    four = bool(given.load_in_4bit)
    wanted = _OF_BITSANDBYTES if four else _OF_BITSANDBYTES[:2]
    found = {name: getattr(given, name) for name in wanted}
    return {name: value for name, value in found.items() if value != ModelSection.model_fields[name].default}


def _arguments(config: _Config) -> dict[str, Any]:
    """Parse `optim_args`, which TRL takes as text such as "momentum=0.9,nesterov=true"."""
    given = config.field("optim_args")
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, Any] = {}
    for part in (given or "").replace(" ", "").split(","):
        name, sign, text = part.partition("=")
        if part and not (name and sign and text):
            raise ConfigError(f"{type(config).__name__}(optim_args={given!r}): write name=value, parted by commas")
        if part:
            found[name] = _value(text)
    return found


def _schedule_arguments(config: _Config) -> dict[str, Any]:
    """Parse `lr_scheduler_kwargs`, which TRL takes as a dict or as JSON."""
    given = config.field("lr_scheduler_kwargs")
    try:
        found = json.loads(given) if isinstance(given, str) else given
        return dict(found or {})
    except (ValueError, TypeError):
        raise ConfigError(
            f"{type(config).__name__}(lr_scheduler_kwargs={given!r}): give a dict, such as {{'num_cycles': 0.5}}"
        ) from None


def _value(text: str) -> Any:
    """Parse a number or a truth value; returns other text as it is."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
