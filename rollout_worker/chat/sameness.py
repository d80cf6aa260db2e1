"""When a value that was read back is the one that was written."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rollout_worker.chat.parsers.base import Unreadable
from rollout_worker.chat.parsers.literal_calls import Literals

_LITERALS = Literals()


def same_value(written: Any, read: Any) -> bool:
    """Is it so? Notations that write every value as text give text back: it is the same value if it reads as it in
    JSON, or as Python writes it. The tools' schemas say then what is meant."""
    if isinstance(written, dict) and isinstance(read, dict):
        return written.keys() == read.keys() and all(same_value(written[key], read[key]) for key in written)
    if isinstance(read, str) and not isinstance(written, str):
        return any(value == written and type(value) is type(written) for value in _readings(read))
    return bool(read == written) and isinstance(read, bool) == isinstance(written, bool)


def _readings(text: str) -> list[Any]:
    readings = []
    with contextlib.suppress(ValueError, RecursionError):
        readings.append(json.loads(text))
    with contextlib.suppress(Unreadable):
        value, end = _LITERALS.read(text, 0)
        if not text[end:].strip():
            readings.append(value)
    return readings
