"""Values of the user's as plain data: a chat template and a transcript meet no object of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any, place: str) -> Any:
    """`value`, all the way down, as JSON has it. It may run user code. Raises `ValueError`, with the place, for what
    messages do not hold."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), place)
    if isinstance(value, str):  # of a class of the user's, such as an enum
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry, f"{place}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{place}[{number}]") for number, entry in enumerate(value)]
    raise ValueError(
        f"{place} is a {type(value).__name__}; messages hold text, numbers, lists and dicts: write it as text"
    )
