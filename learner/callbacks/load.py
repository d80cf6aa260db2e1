"""The objects of `learner.callbacks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from protocol.config import ConfigError
from protocol.config.load import import_for

if TYPE_CHECKING:
    from transformers import TrainerCallback


def load(named: Sequence[str]) -> list[TrainerCallback]:
    """What `named` says, each path/to/file.py:name: a callback, a class of one, several of these, or an object with
    `callbacks`, as a trainer of `slipstream.trl` is. Raises `ConfigError`."""
    found: list[TrainerCallback] = []
    for name in named:
        module, _, wanted = name.rpartition(":")
        imported = import_for(name, "learner.callbacks")
        if not hasattr(imported, wanted):
            raise ConfigError(f"learner.callbacks = {name}: {module} defines no {wanted!r}; define it there")
        found += [_callback(item, name) for item in _items(getattr(imported, wanted))]
    return found


def _items(value: Any) -> list[Any]:
    is_callback = callable(getattr(value, "on_train_begin", None))
    value = value if is_callback else getattr(value, "callbacks", value)
    return list(value) if isinstance(value, list | tuple) else [value]


def _callback(value: Any, name: str) -> TrainerCallback:
    from transformers import TrainerCallback

    if isinstance(value, type) and issubclass(value, TrainerCallback):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"learner.callbacks = {name}: {value.__name__}() raised {type(error).__name__}: {error}; give an "
                f"object in place of the class"
            ) from error
    if not isinstance(value, TrainerCallback):
        raise ConfigError(
            f"learner.callbacks = {name}: it is a {type(value).__name__}; give an object of a class that extends "
            f"transformers.TrainerCallback, that class, or a list of such"
        )
    return value
