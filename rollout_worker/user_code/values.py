"""Converts values that pass to and from user code: copies, plain data and text that can be sent.

Invariant: no change that user code makes to its arguments is visible to anyone else (I9), and chat templates and
transcripts receive no object of the user's.

Arguments are copied. Dicts, lists, tuples and sets are copied at every depth, each occurrence on its own: the eight
prompts of a group are eight lists. Other objects are deep-copied once per call if they can be. Functions, and objects
that cannot be copied, are passed as they are.

Results become plain data. Text is limited in length and encodable as UTF-8. It is cut before anything copies it, so
that a gigabyte of text costs no more than the part that is kept.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from slipstream.protocol.rollouts import MIDDLE_CUT

# Types of values that cannot be changed, and so need no copy.
ATOMS = frozenset({str, int, float, bool, complex, bytes, type(None)})

# Maximum length of a tool's result behind the boundary. The worker cuts it further, by tokens.
MAX_CHARACTERS = 1024 * 1024


def copied(value: Any) -> Any:
    """Copy a value. This may run user code (`__deepcopy__`), so call it behind the boundary."""
    try:
        return _copied(value, {})
    except RecursionError:  # The value contains itself. deepcopy remembers the objects it has seen.
        return copy.deepcopy(value)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {key: entry if type(entry) is str else _copied(entry, memo) for key, entry in value.items()}
    if kind is list:
        if ATOMS.issuperset(map(type, value)):  # A fast path, because lists of token ids are long.
            return value.copy()
        return [_copied(entry, memo) for entry in value]
    if kind is tuple:
        return tuple([_copied(entry, memo) for entry in value])
    if kind is set:
        return value.copy()  # The entries are hashable, and so are assumed not to change.
    if callable(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def plain(value: Any, place: str, keep: tuple[type, ...] = ()) -> Any:
    """Convert a value, at every depth, to the types of JSON. This may run user code.

    Args:
        value: A value of the user's.
        place: Name of the value in errors.
        keep: Types of Slipstream's own that stay as they are.

    Raises:
        ValueError: The value contains an object that messages cannot hold. The text names its place.
    """
    if value is None or type(value) in (str, int, float, bool) or type(value) in keep:
        return value
    numpy = sys.modules.get("numpy")  # Importing it costs a child process 35 ms. A value of numpy has imported it.
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return plain(value.tolist(), place, keep)
    if isinstance(value, str):  # An instance of a user's class, such as an enum.
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry, f"{place}.{key}", keep) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{place}[{number}]", keep) for number, entry in enumerate(value)]
    raise ValueError(
        f"{place} is a {type(value).__name__}; messages hold text, numbers, lists and dicts: write it as text"
    )


def encodable(text: str) -> str:
    """Return `text` as a plain str that UTF-8 can encode.

    Lone surrogates are replaced, because neither messages nor tokenizers accept them.
    """
    return str.encode(text, "utf-8", "replace").decode("utf-8")


def bounded(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return `text` as a plain, encodable str. If it has more than `most` characters, a note replaces the middle."""
    return encodable(without_middle(text, most))


def without_middle(text: str, most: int) -> str:
    """Return `text`. If it has more than `most` characters, a note replaces the middle."""
    size = str.__len__(text)
    if size <= most:
        return text
    half = most // 2
    head, tail = str.__getitem__(text, slice(most - half)), str.__getitem__(text, slice(size - half, size))
    return f"{head}{MIDDLE_CUT.format(size - most)}{tail}"


def as_number(value: Any) -> float:
    """Convert a number, also of numpy or a tensor. `float` alone would read text.

    Raises:
        TypeError: The value is no number.
    """
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{value[:40]!r} is text, and a reward is a number")
    return float(value)


def type_name(value: object) -> str:
    """Return the name of a value's type, as it can be sent."""
    return bounded(type(value).__name__, 200)
