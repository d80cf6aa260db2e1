"""Keeps the history of the run: in memory as columns for charts, and on disk within a bound.

A part of the history that is too much is thinned out: every second status goes, of the oldest parts first, so that all
of the run is there and its newest hours are finest.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from protocol import history
from protocol.history import Columns, Entry, Event, Part, Row, step_row, time_row
from protocol.run_events import between
from protocol.status import Status

# A status is written so often, seconds; events at once.
WRITE_S = 5.0

MAX_EVENTS = 2000

# More workers than these are only counted in what is written.
_MAX_WORKERS = 64

_PART_BYTES = 4 * 1024**2

# Bytes of the files that are read again, at least in part, when a queue starts.
_READ_BYTES = 8 * 1024**2

# A part that was thinned out so often is deleted when there is still no room.
_MAX_THINNED = 6


class Change(msgspec.Struct, frozen=True):
    """What a status added to the history."""

    time: Row
    step: Row | None
    events: list[Event]


class History:
    """The history of one run.

    Args:
        folder: Where it is kept; None keeps it in memory alone.
        max_bytes: Of its files.

    Attributes:
        may_be_full: Whether `make_room` may have something to do.
        failure: Why no more is written, if that is so; the history in memory goes on.
    """

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self.failure: str | None = None
        self.may_be_full = False
        self.time, self.steps = Columns("at"), Columns("step")
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._folder = folder
        self._max_bytes = max_bytes
        self._newest: Status | None = None
        self._step = 0
        self._written_at = float("-inf")
        self._file: _PartFile | None = None

    def load(self) -> None:
        """Read what earlier queues of the run wrote. Blocks; call it before anything is added."""
        if self._folder is None:
            return
        parts = history.parts(self._folder)
        size = sum(_size(part.path) for part in parts)
        for part in parts:
            for entry in history.read_part(part.path, every=1 + size // _READ_BYTES):
                if entry.status is not None:
                    self._newest = entry.status
                    self._show(entry.status, entry.at)
                if entry.event is not None:
                    self.events.append(entry.event)

    def add(self, status: Status, at: float) -> Change:
        """Add the status as of `at`, wall clock, seconds."""
        events = between(self._newest, status, at)
        self._newest = status
        self.events += events
        self._write([Entry(at, event=event) for event in events])
        if at - self._written_at >= WRITE_S or at < self._written_at:
            self._written_at = at
            there = [worker for worker in status.workers if worker.does != "left"][:_MAX_WORKERS]
            self._write([Entry(at, msgspec.structs.replace(status, workers=there))])
        row, step = self._show(status, at)
        return Change(row, step, events)

    def make_room(self) -> None:
        """Thin out or delete old parts until the rest fits. Blocks; `add` may be called meanwhile."""
        self.may_be_full = False
        with suppress(OSError):
            while self._folder is not None and self._size() > self._max_bytes:
                newest = self._file.part.number if self._file is not None else None
                parts = [part for part in history.parts(self._folder) if part.number != newest]
                if not parts:
                    return
                part = min(parts, key=lambda part: (part.thinned, part.number))
                if part.thinned < _MAX_THINNED:
                    _thin(part)
                else:
                    part.path.unlink()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()

    def _show(self, status: Status, at: float) -> tuple[Row, Row | None]:
        row, step = time_row(at, status), step_row(at, status)
        self.time.add(row)
        if step is None or step["step"] == self._step:
            return row, None
        number = int(step["step"] or 0)
        if number < self._step:
            self.steps.forget_from(number)
        self._step = number
        self.steps.add(step)
        return row, step

    def _write(self, entries: Sequence[Entry]) -> None:
        if self._folder is None or self.failure is not None or not entries:
            return
        try:
            if self._file is not None and self._file.bytes >= _PART_BYTES:
                self._file.close()
                self._file, self.may_be_full = None, True
            if self._file is None:
                self._folder.mkdir(exist_ok=True)
                number = 1 + max((part.number for part in history.parts(self._folder)), default=0)
                self._file = _PartFile(Part.named(self._folder, number))
            self._file.write(entries)
        except OSError as error:
            self.failure = f"the history of the run ends here: {self._folder}: {error.strerror or error}"
            self.close()

    def _size(self) -> int:
        assert self._folder is not None
        return sum(_size(part.path) for part in history.parts(self._folder))


class _PartFile:
    """A part that is being written. What was written can be read at once, and after a kill."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.bytes = 0
        self._file = part.path.open("xb", buffering=0)
        self._compressor = zlib.compressobj(6, zlib.DEFLATED, 31)

    def write(self, entries: Sequence[Entry]) -> None:
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
        self._put(self._compressor.compress(lines) + self._compressor.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        try:
            self._put(self._compressor.flush())
        finally:
            self._file.close()

    def _put(self, data: bytes) -> None:
        self.bytes += self._file.write(data) or 0


def _thin(part: Part) -> None:
    """Leave out every second status of a part. Of two files, the one that was not thinned out counts."""
    thinner = Part.named(part.path.parent, part.number, part.thinned + 1)
    unfinished = thinner.path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    file = _PartFile(msgspec.structs.replace(thinner, path=unfinished))
    statuses = 0
    for entry in history.read_part(part.path):
        statuses += entry.status is not None
        if entry.status is None or statuses % 2:
            file.write([entry])
    file.close()
    os.replace(unfinished, thinner.path)
    part.path.unlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
