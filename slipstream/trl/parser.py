"""TRL's `TrlParser` for scripts whose configs are those of `slipstream.trl`. It needs TRL itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from slipstream.trl.configs import AsyncGRPOConfig, GRPOConfig, RLOOConfig, _Config

_TrlParser: Any = import_module("trl").TrlParser

_OURS = (GRPOConfig, RLOOConfig, AsyncGRPOConfig)


class TrlParser(_TrlParser):  # type: ignore[misc]
    """Parses arguments and YAML files as TRL's does. What is given becomes the fields of a config of ours."""

    def __init__(self, dataclass_types: Any = None, **given: Any) -> None:
        kinds = (
            dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types] if dataclass_types else []
        )
        self._ours: dict[type, type[_Config]] = {}
        super().__init__([self._stand_in(kind) for kind in kinds], **given)

    def _stand_in(self, kind: Any) -> Any:
        """Return TRL's dataclass in place of ours, without its checks: they look for this machine's devices."""
        if kind not in _OURS:
            return kind
        made = type(kind.__name__, (_theirs(kind),), {"__post_init__": lambda self: None})
        self._ours[made] = kind
        return made

    def parse_args_and_config(self, *args: Any, **given: Any) -> Any:
        """Return the parsed dataclasses, as TRL's parser does."""
        return tuple(self._translated(found) for found in super().parse_args_and_config(*args, **given))

    def parse_args_into_dataclasses(self, *args: Any, **given: Any) -> Any:
        """Return the parsed dataclasses, as transformers' parser does."""
        return tuple(self._translated(found) for found in super().parse_args_into_dataclasses(*args, **given))

    def _translated(self, found: Any) -> Any:
        from transformers import HfArgumentParser

        ours = self._ours.get(type(found))
        if ours is None:
            return found
        (left,) = HfArgumentParser(type(found)).parse_args_into_dataclasses([])
        made = ours()
        for field in dataclasses.fields(found):
            value = getattr(found, field.name)
            if field.init and value != getattr(left, field.name):
                setattr(made, field.name, value)
        return made


def _theirs(kind: type[_Config]) -> type:
    module = "trl.experimental.async_grpo" if kind is AsyncGRPOConfig else "trl"
    found: type = getattr(import_module(module), kind.__name__)
    return found
