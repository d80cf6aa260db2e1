"""`rollouts.jsonl`: some rollouts of each step, for reading. Bounded, and on one time line as the journals are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.rollouts import RolloutView

MAX_BYTES = 64 * 1024**2


class _Step(msgspec.Struct):
    step: int


class RolloutLog:
    """A file of `RolloutView` lines in the order of the steps: opened at step c, it forgets what was written after c.

    Beyond `max_bytes` the older half is let go.
    """

    def __init__(self, path: Path, step: int, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(_end_of(path, step))
            self._size = file.seek(0, os.SEEK_END)

    def append(self, views: Sequence[RolloutView]) -> None:
        """Append the rollouts of one step."""
        lines = b"".join(msgspec.json.encode(view) + b"\n" for view in views)
        with self._path.open("ab") as file:
            file.write(lines)
        self._size += len(lines)
        if self._size > self._max_bytes:
            self._halve()

    def _halve(self) -> None:
        aside = self._path.with_suffix(".unfinished")
        with self._path.open("rb") as old, aside.open("wb") as new:
            old.seek(self._size - self._max_bytes // 2)
            old.readline()  # the rest of a line that begins before
            shutil.copyfileobj(old, new)
            self._size = new.tell()
        os.replace(aside, self._path)


def _end_of(path: Path, step: int) -> int:
    """Bytes of the lines up to `step`; a line that a kill cut short, and what follows it, is not among them."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or msgspec.json.decode(line, type=_Step).step > step:
                    break
            except msgspec.DecodeError:
                break
            end += len(line)
    return end
