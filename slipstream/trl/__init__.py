"""TRL's classes: a script for TRL runs when `from trl import ...` becomes `from slipstream.trl import ...`.

docs/from_trl.md lists how each field and argument is translated.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

from slipstream.trl.configs import AsyncGRPOConfig, GRPOConfig, RLOOConfig
from slipstream.trl.trainer import AsyncGRPOTrainer, GRPOTrainer, RLOOTrainer, TrainOutput

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "TrainOutput",
]


# What TRL has for the arguments of scripts: the parser is adapted, and the rest works as it is.
_FOR_ARGUMENTS = ("ModelConfig", "ScriptArguments", "get_kbit_device_map", "get_peft_config", "get_quantization_config")


def _elsewhere(name: str) -> str:
    return f"slipstream.trl has TRL's online trainers and their configs, not {name}"


class _OtherModules(MetaPathFinder):
    """Says what to write in place of a module of TRL's that is not here. Asked after all other finders."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith(f"{__name__}.experimental.async_grpo."):
            raise ModuleNotFoundError(
                f"TRL 1.18 removed the modules of {__name__}.experimental.async_grpo; write: from {__name__} import "
                f"AsyncGRPOConfig, AsyncGRPOTrainer",
                name=fullname,
            )
        if fullname.startswith(f"{__name__}."):
            theirs = fullname.removeprefix("slipstream.")
            raise ModuleNotFoundError(
                f"{_elsewhere(theirs)}; import it from TRL: from {theirs} import ...", name=fullname
            )


sys.meta_path.append(_OtherModules())


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "TrlParser":
        return import_module(f"{__name__}.parser").TrlParser
    if name in _FOR_ARGUMENTS:
        return getattr(import_module("trl"), name)
    raise ImportError(f"{_elsewhere(name)}; import it from TRL: from trl import {name}")
