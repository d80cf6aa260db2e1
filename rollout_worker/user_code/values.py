"""Copies of what is handed to user code, so that nothing it changes is seen by anyone else (I9).

Dicts, lists, tuples and sets are copied to the bottom, each place on its own: the eight prompts of a group are eight
lists. Other objects are deep-copied once for a call, where that works; functions and what cannot be copied are handed
out as they are.
"""

from __future__ import annotations

import copy
from typing import Any

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
