"""Whether the names and numbers in `[lora]` are those of layers: peft warns of some that are not, or says nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from protocol.config import ConfigError, LoraSection


def check(network: Any, lora: LoraSection) -> None:
    """Raise `ConfigError` for a name that no module of the network has, before it has an adapter."""
    there = [name for name, _ in network.named_modules()]
    lists = {"exclude_modules": lora.exclude_modules, "modules_to_save": lora.modules_to_save}
    if not isinstance(lora.target_modules, str):
        lists["target_modules"] = lora.target_modules
    for setting, names in lists.items():
        for wanted in names:
            if not any(name == wanted or name.endswith(f".{wanted}") for name in there):
                raise ConfigError(
                    f"lora.{setting} = {names}: {type(network).__name__} has no layer {wanted}; "
                    f"{_names_of(there)}, or leave it out"
                )


def check_adapted(adapted: Sequence[str], lora: LoraSection) -> None:
    """adapted: names of the layers that got a part of the adapter. Raise `ConfigError` for patterns and numbers that
    stand for none of them."""
    for setting, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            # As peft matches them (`peft.utils.other.get_pattern_key`).
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted):
                raise ConfigError(
                    f"lora.{setting} = {dict(patterns)}: {pattern} is no layer that has an adapter; "
                    f"{_names_of(adapted)}, or leave it out"
                )
    for number in lora.layers_to_transform:
        if not any(f".{number}." in name for name in adapted):
            raise ConfigError(
                f"lora.layers_to_transform = {lora.layers_to_transform}: no layer {number} has an adapter; layers "
                f"count from 0: leave it out, or choose another"
            )


def _names_of(modules: Sequence[str]) -> str:
    """The last parts of their names, of those in layers, which are numbered."""
    last = sorted({name.rpartition(".")[2] for name in modules if re.search(r"\.\d+\..*[a-z]", name)})
    return f"choose from {', '.join(last)}"
