"""None in a prompt's messages that stands for a key that a message does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_none(columns: Any, deep: bool) -> Any:
    """`columns` without the None that stands for what a message of the prompt does not have.

    Files and Arrow tables fill up messages that differ in their keys. `deep`: inside of them too (tool calls), where
    an Arrow table cannot tell None from what is not there.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"it is a {type(columns).__name__}, not a mapping of columns")
    prompt = columns.get("prompt")
    if not isinstance(prompt, list) or not any(_has_none(message, deep) for message in prompt):
        return columns
    return {**columns, "prompt": [_without_none(message, deep) for message in prompt]}


def _has_none(value: Any, deep: bool) -> bool:
    if isinstance(value, Mapping):
        return any(entry is None or (deep and _has_none(entry, deep)) for entry in value.values())
    return deep and isinstance(value, list) and any(_has_none(entry, deep) for entry in value)


def _without_none(value: Any, deep: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry, deep) if deep else entry for key, entry in value.items() if entry is not None}
    return [_without_none(entry, deep) for entry in value] if deep and isinstance(value, list) else value
