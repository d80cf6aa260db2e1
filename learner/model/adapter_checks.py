"""Checks that everything that [lora] names is in the model, and that each layer's adapter is computed. peft silently
accepts a name that fits nothing, as long as another one fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.learner.model.loading import text_tower
from slipstream.protocol.config import ConfigError, LoraSection
from slipstream.protocol.config.adapter_checks import pattern_of
from slipstream.protocol.config.sections.base import toml_value
from slipstream.protocol.config.text import nearest

# How peft finds a layer's number in the name of a module in it (`peft.tuners.tuners_utils`).
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")

_PATTERNS = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class ModuleNames:
    """Full names of a network's modules.

    Attributes:
        everything: All modules.
        layers: Modules with nothing inside.
        reachable: Layers that rows pass through.
        linear: The linear ones of these, without the output layer.
    """

    everything: Sequence[str]
    layers: Sequence[str]
    reachable: Sequence[str]
    linear: Sequence[str]

    @classmethod
    def of(cls, network: Any) -> ModuleNames:
        """List them before the network has an adapter; its weights may be on the meta device."""
        output = network.get_output_embeddings()
        inside = {id(module) for module in (*text_tower(network).modules(), output)}
        modules = [(name, module) for name, module in network.named_modules() if name]
        layers = [(name, of) for name, of in modules if not list(of.children())]
        reachable = [(name, of) for name, of in layers if id(of) in inside]
        return cls(
            [name for name, _ in modules],
            [name for name, _ in layers],
            [name for name, _ in reachable],
            [name for name, of in reachable if isinstance(of, torch.nn.Linear) and of is not output],
        )


def check_used(network: Any, compute: Callable[[], object]) -> None:
    """Raise `ConfigError` for a layer that the network computes past its adapter, with the layer's own weights: kernels
    of models with a state do. Single experts may have had no token.

    Args:
        network: Has the adapter.
        compute: Sends tokens through the network.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    output = network.get_output_embeddings()
    idle = {
        module: name
        for name, module in network.named_modules()
        if isinstance(module, BaseTunerLayer) and module is not output and ".experts." not in name
    }
    hooks = [module.register_forward_pre_hook(lambda module, _: _ran(idle, module)) for module in idle]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    if idle:
        names = _last_parts(idle.values())
        raise ConfigError(
            f"lora.target_modules: {type(network).__name__} computes {', '.join(names)} with the layer's own weights, "
            f"past an adapter, which would train nothing; set lora.exclude_modules = {toml_value(names)}"
        )


def _ran(idle: dict[torch.nn.Module, str], module: torch.nn.Module) -> None:
    idle.pop(module, None)


def check_adapter_names(lora: LoraSection, names: ModuleNames) -> None:
    """Raise `ConfigError` for a layer, a module or a number of a layer that the model does not have."""
    linear = _last_parts(names.linear)
    has = f"the model's linear layers are {', '.join(linear)}"
    numbers = sorted({int(match[1]) for name in names.linear if (match := _LAYER.match(name))})
    if unknown := [number for number in lora.layers_to_transform if number not in numbers]:
        counted = f"{numbers[0]} to {numbers[-1]}" if numbers else "none with a number"
        raise ConfigError(
            f"lora.layers_to_transform = {lora.layers_to_transform}: there is no layer {unknown[0]}; the model's are "
            f"{counted}"
        )
    if isinstance(lora.target_modules, list):
        for wanted in lora.target_modules:
            if not any(_is(name, wanted) for name in names.reachable):
                raise _unknown("target_modules", lora.target_modules, wanted, linear, has)
    elif lora.target_modules not in ("auto", "all-linear"):
        _check_expression(lora.target_modules, names, has)
    for unwanted in lora.exclude_modules:
        if not any(_is(name, unwanted) for name in names.layers):
            raise _unknown("exclude_modules", lora.exclude_modules, unwanted, linear, has)
    for whole in lora.modules_to_save:
        if not any(name.endswith(whole) for name in names.everything):
            parts = [part for part in _last_parts(names.everything) if not part.isdigit()]
            raise _unknown("modules_to_save", lora.modules_to_save, whole, parts, f"it has {', '.join(parts)}")


def check_rank_patterns(lora: LoraSection, adapted: Collection[str]) -> None:
    """Raise `ConfigError` for a rank or an alpha that fits no layer of the adapter.

    Args:
        adapted: Full names of the layers with a part of the adapter.
    """
    parts = _last_parts(adapted)
    for setting in _PATTERNS:
        patterns = getattr(lora, setting)
        for pattern in patterns:
            if not any(re.match(pattern_of(pattern), name) for name in adapted):
                raise _unknown(setting, patterns, pattern, parts, f"the adapter's layers are {', '.join(parts)}")


def _check_expression(expression: str, names: ModuleNames, has: str) -> None:
    if any(re.fullmatch(expression, name) for name in names.reachable):
        return
    setting = f"lora.target_modules = {toml_value(expression)}: "
    if any(_is(name, expression) for name in names.reachable):
        raise ConfigError(f'{setting}a text is a regular expression of whole names; write a list: ["{expression}"]')
    example = f"; a whole name is {names.linear[0]}" if names.linear else ""
    raise ConfigError(f"{setting}no whole name of a layer fits this regular expression; {has}{example}")


def _unknown(setting: str, value: object, name: str, near: Iterable[str], has: str) -> ConfigError:
    close = nearest(name, near)
    meant = f"; did you mean {close}?" if close else ";"
    return ConfigError(f"lora.{setting} = {toml_value(value)}: nothing in the model is called {name}{meant} {has}")


def _is(name: str, wanted: str) -> bool:
    """Compare names of layers as peft does."""
    return name == wanted or name.endswith(f".{wanted}")


def _last_parts(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))
