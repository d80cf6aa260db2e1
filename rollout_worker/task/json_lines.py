"""Rows of JSON lines, left in their files: only where each line begins is held in memory.

An open file keeps its content when another one is put in its place, as editors do.
"""

from __future__ import annotations

import gzip
import json
import os
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast, overload

from protocol.config import ConfigError

_MARK = b"\xef\xbb\xbf"  # that some programs write before UTF-8


class JsonLines(Sequence[dict[str, Any]]):
    """The objects of one or several files, one a line; empty lines are passed over. A file may end in .gz: it is then
    held in memory. Safe to be read from several threads. Raises `ConfigError` for a line that is not an object, when
    it is read, and for a file that cannot be opened.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._read: list[Callable[[int, int], bytes]] = []
        self._file, self._start, self._size = array("q"), array("q"), array("q")
        for number, file in enumerate(files):
            with open_text(file) as text:
                self._find_lines(number, text)
                self._read.append(self._reader(file, text))

    def __len__(self) -> int:
        return len(self._start)

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, number: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        read, start = self._read[self._file[number]], self._start[number]
        try:
            row = json.loads(read(start, self._size[number]))
        except (ValueError, RecursionError) as error:
            raise self._wrong(number, f"is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise self._wrong(number, f"is a {type(row).__name__}, not an object")
        return row

    def _find_lines(self, number: int, text: IO[bytes]) -> None:
        place = 0
        for line in text:
            skipped = len(_MARK) if not place and line.startswith(_MARK) else 0
            if line[skipped:].strip():
                self._file.append(number)
                self._start.append(place + skipped)
                self._size.append(len(line) - skipped)
            place += len(line)

    def _reader(self, file: Path, text: IO[bytes]) -> Callable[[int, int], bytes]:
        """Reads (start, size) of a file's content."""
        if file.suffix == ".gz":
            text.seek(0)
            content = text.read()
            return lambda start, size: content[start : start + size]
        descriptor = os.dup(text.fileno())
        weakref.finalize(self, os.close, descriptor)
        return lambda start, size: os.pread(descriptor, size, start)

    def _wrong(self, number: int, what: str) -> ConfigError:
        file = self._file[number]
        line = 1 + self._read[file](0, self._start[number]).count(b"\n")
        return ConfigError(f"Task(dataset=...): {self._files[file]} line {line} {what}; write one object a line")


def open_text(file: Path) -> IO[bytes]:
    """The file's content, read from its start, without its compression. Raises `ConfigError`."""
    try:
        return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else file.open("rb")
    except OSError as error:
        raise ConfigError(f"Task(dataset=...): {file} cannot be read: {error.strerror}") from None
