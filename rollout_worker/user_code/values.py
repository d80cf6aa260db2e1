"""Copies of what is handed to user code, so that nothing it changes is seen by anyone else (I9).

Dicts, lists, tuples and sets are copied to the bottom, each place on its own: the eight prompts of a group are eight
lists. Other objects are deep-copied once for a call, where that works; functions and what cannot be copied are handed
out as they are.

Values of the user's as plain data: a chat template and a transcript meet no object of theirs.

Text of the user's made fit to be sent: bounded, and of what UTF-8 can write.

Text is cut before anything copies it, so that a gigabyte of it costs no more than what is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

# Values that cannot be changed.
ATOMS = frozenset({str, int, float, bool, complex, bytes, type(None)})


def copied(value: Any) -> Any:
    """A copy. It may run user code (`__deepcopy__`), so it is called behind the boundary."""
    try:
        return _copied(value, {})
    except RecursionError:  # it holds itself: deepcopy knows what it has seen
        return copy.deepcopy(value)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {key: entry if type(entry) is str else _copied(entry, memo) for key, entry in value.items()}
    if kind is list:
        if ATOMS.issuperset(map(type, value)):  # token ids are many
            return value.copy()
        return [_copied(entry, memo) for entry in value]
    if kind is tuple:
        return tuple([_copied(entry, memo) for entry in value])
    if kind is set:
        return value.copy()  # what is in it is hashable, and so taken not to change
    if callable(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


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


# Of a tool's result, behind the boundary; the worker cuts it further, by tokens.
MAX_CHARACTERS = 1024 * 1024


def encodable(text: str) -> str:
    """`text` as a plain str; what UTF-8 cannot write, a lone surrogate, is replaced: no message takes it, and no
    tokenizer."""
    return str.encode(text, "utf-8", "replace").decode("utf-8")


def bounded(text: str, most: int = MAX_CHARACTERS) -> str:
    """`text` as a plain str, encodable; of more than `most` characters the middle is left out, with a note."""
    return encodable(without_middle(text, most))


def without_middle(text: str, most: int) -> str:
    """`text`, of which the characters in the middle are left out, with a note, where there are more than `most`."""
    size = str.__len__(text)
    if size <= most:
        return text
    half = most // 2
    head, tail = str.__getitem__(text, slice(most - half)), str.__getitem__(text, slice(size - half, size))
    return f"{head}... ({size - most} characters left out) ...{tail}"


def type_name(value: object) -> str:
    """The name of its type, without running the type's own code: a metaclass may answer for `__name__`."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return bounded(name, 200)
