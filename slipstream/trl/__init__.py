"""TRL's classes: a script for TRL runs when `from trl import ...` becomes `from slipstream.trl import ...`.

docs/from_trl.md lists how each field and argument is translated.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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

_LOOP = "workers are processes of the run; your own loop is a rollout_func or an agent (docs/agents.md)"

# Modules of TRL, with the class that scripts import from each.
_MODULES = {
    f"{__name__}.trainer.grpo_config": "GRPOConfig",
    f"{__name__}.trainer.grpo_trainer": "GRPOTrainer",
    f"{__name__}.trainer.rloo_config": "RLOOConfig",
    f"{__name__}.trainer.rloo_trainer": "RLOOTrainer",
    f"{__name__}.trainer.async_grpo_config": "AsyncGRPOConfig",
    f"{__name__}.trainer.async_grpo_trainer": "AsyncGRPOTrainer",
}


def _elsewhere(name: str) -> str:
    return f"slipstream.trl has TRL's online trainers and their configs, not {name}"


class _Named(Loader):
    """Makes a module of `_MODULES`, which holds the one class."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name, own = module.__name__, _MODULES[module.__name__]
        loop = f"; {_LOOP}" if own == "AsyncGRPOTrainer" else ""

        def missing(wanted: str) -> Any:
            if wanted.startswith("_"):
                raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
            raise ImportError(f"{name} has {own}, not {wanted}{loop}")

        vars(module).update({own: globals()[own], "__getattr__": missing})


class _OtherModules(MetaPathFinder):
    """Finds the modules of `_MODULES`, and says what to write in place of another one of TRL's. Asked after all other
    finders."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in _MODULES:
            return ModuleSpec(fullname, _Named())
        if fullname.startswith(f"{__name__}.experimental.async_grpo."):
            raise ModuleNotFoundError(
                f"TRL 1.18 removed the modules of {__name__}.experimental.async_grpo; write: from {__name__} import "
                f"AsyncGRPOConfig, AsyncGRPOTrainer",
                name=fullname,
            )
        if fullname == f"{__name__}.generation" or fullname.startswith(f"{__name__}.generation."):
            raise ModuleNotFoundError(
                f"there is no {fullname}: the run starts vLLM and talks to it by itself; leave the import out, or for "
                f"a loop of your own write a rollout_func or an agent (docs/agents.md)",
                name=fullname,
            )
        if fullname.startswith(f"{__name__}."):
            theirs = fullname.removeprefix("slipstream.")
            raise ModuleNotFoundError(
                f"{_elsewhere(theirs)}; import it from TRL: from {theirs} import ...", name=fullname
            )
        return None


sys.meta_path.append(_OtherModules())


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "TrlParser":
        return import_module(f"{__name__}.parser").TrlParser
    if name in _FOR_ARGUMENTS:
        return getattr(import_module("trl"), name)
    raise ImportError(f"{_elsewhere(name)}; import it from TRL: from trl import {name}")
