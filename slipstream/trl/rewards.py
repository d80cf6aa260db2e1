"""TRL's reward functions, which work as they are. They need TRL itself."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module("trl.rewards"), name)
