"""How a TRL run steps, and what of the model trains, as settings of a run file: optimiser, schedule, adapter, quantised
base. Pure: peft's and transformers' objects are read, neither is imported."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import ValidationError

from protocol.config import ConfigError, LoraSection, ModelSection
from slipstream.trl.configs import _Config
from slipstream.trl.learner_settings import number

_EPSILON = 1e-8
# Fields of peft's LoraConfig that say nothing of what is trained here.
_OF_PEFT = (
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config"),
)
_OF_BITSANDBYTES = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")


def optimiser_settings(config: _Config, steps: int | None, notes: list[str]) -> dict[str, Any]:
    """Settings of [learner]. steps: of the run, None where they are not known yet. Adds to `notes` what a reader of the
    script should know. Raises `ConfigError`."""
    settings: dict[str, Any] = {"betas": [number(config, "adam_beta1"), number(config, "adam_beta2")]}
    arguments = _arguments(config)
    if (epsilon := number(config, "adam_epsilon")) not in (None, _EPSILON):
        arguments["eps"] = float(epsilon)
    if arguments:
        settings["optim_args"] = arguments
    warmup = number(config, "warmup_steps")
    if 0 < warmup < 1:
        if steps is None:
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
    """Settings of [lora] from the `peft_config` of a trainer of class `kind`. Raises `ConfigError` for another adapter
    than LoRA, and for what has no setting."""
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
    """Settings of [model] from the `quantization_config` of a trainer. Raises `ConfigError` for another than
    bitsandbytes'."""
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
    """`optim_args`, which TRL takes as text such as "momentum=0.9,nesterov=true"."""
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
    """`lr_scheduler_kwargs`, which TRL takes as a dict or as JSON."""
    given = config.field("lr_scheduler_kwargs")
    try:
        found = json.loads(given) if isinstance(given, str) else given
        return dict(found or {})
    except (ValueError, TypeError):
        raise ConfigError(
            f"{type(config).__name__}(lr_scheduler_kwargs={given!r}): give a dict, such as {{'num_cycles': 0.5}}"
        ) from None


def _value(text: str) -> Any:
    """A number or a truth value, where the text is one."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
