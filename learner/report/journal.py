"""Journals: files of JSON lines in the run directory, with one line for each step, publication or evaluation."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, get_type_hints

import msgspec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One line of a journal, about optimiser step `step`.

    A field that is a dataclass is a part: its fields stand in the line next to the record's own, so a metric is named
    once, where it is made.

    Attributes:
        RENAMED: Names in the line of fields that are better known by another name.
        SPREAD: Fields that map names to metrics. These stand in the line themselves, under `field/name` if a name is
            taken. They are for people, so they are not read back.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}
    SPREAD: ClassVar[Sequence[str]] = ()

    step: int

    def flat(self) -> dict[str, Any]:
        """Return the line."""
        values = dict(_values(self))
        line = {self.RENAMED.get(name, name): value for name, value in values.items() if name not in self.SPREAD}
        line |= self.derived()
        for field in self.SPREAD:
            line |= {f"{field}/{name}" if name in line else name: value for name, value in values[field].items()}
        return line

    def derived(self) -> dict[str, Any]:
        """Return metrics that follow from several parts; they stand in the line, and are not read back."""
        return {}

    @classmethod
    def of(cls, line: dict[str, Any]) -> Self:
        """Read a line that `flat` wrote, in this release or the one before. Raises `msgspec.ValidationError`."""
        known = {name: value for name, value in line.items() if name not in cls.SPREAD}
        known |= {name: line[key] for name, key in cls.RENAMED.items() if key in line}
        parts = {name: known for name, kind in get_type_hints(cls).items() if is_dataclass(kind)}
        return msgspec.convert(known | parts, cls)


def _values(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield fields and their values, those of a part in its place."""
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            yield from _values(value)
        else:
            yield field.name, value


# Maximum bytes of a line, far above any that is written.
_MAX_LINE = 4 * 1024**2

R = TypeVar("R", bound=Record)


class Journal(Generic[R]):
    """A file of JSON lines on one time line: opened at step c, it forgets what was written after c.

    A line that cannot be written, as where the disk is full, waits for the next one: no step depends on its report. A
    file that somebody deleted is written again.

    Args:
        warn: Called with a text when lines begin to wait, and when they are written.

    Attributes:
        records: One record for each line.
    """

    def __init__(self, path: Path, kind: type[R], step: int, warn: Callable[[str], None] | None = None) -> None:
        kept = [(line, record) for line, record in _read(path, kind) if record.step <= step]
        self.records = [record for _, record in kept]
        self._path = path
        self._warn = warn or logger.warning
        self._waiting: list[bytes] = []
        self._failed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        # Lines stay as they were: another release may have written metrics that this one does not know.
        aside = path.with_suffix(".unfinished")
        aside.write_bytes(b"".join(line + b"\n" for line, _ in kept))
        os.replace(aside, path)

    def append(self, record: R) -> None:
        """Append a line."""
        self.records.append(record)
        self._waiting.append(_line(record))
        self._write()

    def amend(self, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        """Write the newest line again as `change` returns it, for metrics that came too late for it. Without a line it
        does nothing."""
        if self._waiting:
            self._waiting[-1] = msgspec.json.encode(change(msgspec.json.decode(self._waiting[-1]))) + b"\n"
            self._write()
            return
        with self._path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _MAX_LINE)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
            if not lines or (start and len(lines) == 1):
                return
            last = msgspec.json.decode(lines[-1])
            file.seek(size - len(lines[-1]))
            file.write(msgspec.json.encode(change(last)) + b"\n")
            file.truncate()

    def _write(self) -> None:
        """Append the lines that wait, all or none, so that none is cut in the middle of the file."""
        try:
            if not self._path.exists():
                if not self._failed:
                    self._warn(f"{self._path} was deleted: it is written again")
                self._waiting = [_line(record) for record in self.records[: -len(self._waiting)]] + self._waiting
            append_whole(self._path, b"".join(self._waiting))
        except OSError as error:
            if not self._failed:
                self._failed = True
                why = os.strerror(error.errno) if error.errno else str(error)
                self._warn(f"{self._path} cannot be written: {why}; the run continues, and the lines wait for room")
            return
        if self._failed:
            self._failed = False
            self._warn(f"{self._path} is written again, with the {len(self._waiting)} lines that waited")
        self._waiting.clear()


def append_whole(path: Path, data: bytes) -> None:
    """Append to a file, or leave it as it was. Raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


class _Versioned(msgspec.Struct):
    version: int
    step: int = 0


def newest_version(path: Path) -> int:
    """Return the greatest policy version in a journal, given-up time lines included; 0 where there is none."""
    return max((line.version for line in _versioned(path)), default=0)


def newest_step(path: Path) -> int:
    """Return the greatest step in a journal, given-up time lines included; 0 where there is none."""
    return max((line.step for line in _versioned(path)), default=0)


def _versioned(path: Path) -> Iterator[_Versioned]:
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield msgspec.json.decode(line, type=_Versioned)
        except msgspec.DecodeError:
            continue  # cut short by a kill, or not about a version


def _line(record: Record) -> bytes:
    return msgspec.json.encode(record.flat()) + b"\n"


def _read(path: Path, kind: type[R]) -> list[tuple[bytes, R]]:
    """Read each line with its record."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append((line, kind.of(msgspec.json.decode(line))))
        except msgspec.DecodeError:
            break  # a kill cut this line short; nothing follows it
    return found
