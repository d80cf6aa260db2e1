"""The bodies of groups next to the SQLite file, in files that only grow: each body is written once.

SQLite would write it twice, to its log and to its file. A body is written before the commit that says it is there. What
is deleted stays where it is until its whole file is no longer needed. The files are not synced: a power cut may take
the end of one, as the next start finds, and the prompts of those groups are sampled again.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import crc32c

from slipstream.rollout_queue.store.base import StoreError
from slipstream.rollout_queue.store.changes import Payload

# A file that is larger gets nothing more. A small one goes soon after its last group, and is deleted quickly.
FILE_BYTES = 16 * 1024**2

_NAME = re.compile(r"(\d{6,})\.groups")

# Each body comes after a head: its ticket's id, its length, its checksum (-1 for none), and the checksum of these.
_HEAD = struct.Struct("<40sQq")
_HEAD_CHECKSUM = struct.Struct("<I")
_NO_CHECKSUM = -1
_BEFORE_BODY = _HEAD.size + _HEAD_CHECKSUM.size


class _Place(NamedTuple):
    """Where a body is, in bytes from the beginning of a file."""

    file: int
    begin: int
    length: int
    checksum: int


class GroupFiles:
    """A folder of bodies by ticket id. `keep_only` or `read_places` comes first. Every method may raise `OSError`.

    Attributes:
        bytes: Of all files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._places: dict[str, _Place] = {}
        self._held: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._file = 0  # the newest file; it may not be there yet

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def read_places(self) -> None:
        """Find all bodies. One whose head is damaged takes those behind it in its file with it."""
        self._places, self._sizes = {}, {}
        with suppress(FileNotFoundError):
            numbers = (int(found[1]) for name in os.listdir(self._folder) if (found := _NAME.fullmatch(name)))
            for number in sorted(numbers):
                self._sizes[number] = os.stat(self._path(number)).st_size
                self._places.update(self._scan(number))
        self._held = Counter(place.file for place in self._places.values())
        self._file = 1 + max(self._sizes, default=0)

    def keep_only(self, ticket_ids: Collection[str]) -> None:
        """Create the folder, find all bodies, and delete those that belong to none of these tickets."""
        os.makedirs(self._folder, exist_ok=True)
        self.read_places()
        self.delete([name for name in self._places if name not in ticket_ids])
        for number in [number for number in self._sizes if not self._held[number]]:
            self._delete_file(number)

    @contextmanager
    def written(self, payloads: Mapping[str, Payload]) -> Iterator[None]:
        """Write bodies. They are taken out again if what is done within fails.

        Raises:
            StoreError: The newest file is not as it was left.
        """
        if not payloads:
            yield
            return
        if self._sizes.get(self._file, 0) >= FILE_BYTES:
            self._file += 1
            if not self._held[self._file - 1]:
                self._delete_file(self._file - 1)
        is_new = self._file not in self._sizes
        path, begin = self._path(self._file), self._sizes.get(self._file, 0)
        try:
            # One that is there is not created again: whoever deleted it took bodies with it.
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0))
        except FileNotFoundError:
            raise _taken_away(path) from None
        try:
            if os.fstat(file).st_size != begin:
                raise _taken_away(path)
            try:
                places = self._append(file, begin, payloads)
                yield
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(file, begin)
                raise
            self._sizes[self._file] = os.fstat(file).st_size
        finally:
            self._sizes.setdefault(self._file, 0)
            os.close(file)
        self.delete(places.keys() & self._places.keys())
        self._places.update(places)
        self._held[self._file] += len(places)

    def read(self, ticket_ids: Iterable[str]) -> dict[str, Payload]:
        """Return the bodies of these tickets. Those that are not there whole any more are left out."""
        found = {}
        for name in ticket_ids:
            if (place := self._places.get(name)) is not None:
                with suppress(FileNotFoundError), open(self._path(place.file), "rb", buffering=0) as file:
                    body = os.pread(file.fileno(), place.length, place.begin)
                    if len(body) == place.length:
                        found[name] = Payload(body, None if place.checksum == _NO_CHECKSUM else place.checksum)
        return found

    def delete(self, ticket_ids: Iterable[str]) -> None:
        for name in ticket_ids:
            if (place := self._places.pop(name, None)) is not None:
                self._held[place.file] -= 1
                if not self._held[place.file] and place.file != self._file:
                    self._delete_file(place.file)

    def link_into(self, folder: Path) -> None:
        """Link the files into another folder, where they outlive their deletion here."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                with suppress(FileNotFoundError, FileExistsError):
                    os.link(f"{self._folder}/{name}", folder / name)

    def __contains__(self, ticket_id: object) -> bool:
        return ticket_id in self._places

    def _append(self, file: int, at: int, payloads: Mapping[str, Payload]) -> dict[str, _Place]:
        places = {}
        for name, payload in payloads.items():
            checksum = _NO_CHECKSUM if payload.checksum is None else payload.checksum
            head = _HEAD.pack(name.encode(), len(payload.body), checksum)
            _write(file, head + _HEAD_CHECKSUM.pack(crc32c.crc32c(head)), payload.body)
            places[name] = _Place(self._file, at + _BEFORE_BODY, len(payload.body), checksum)
            at += _BEFORE_BODY + len(payload.body)
        return places

    def _delete_file(self, number: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(number))
        self._sizes.pop(number, None)
        self._held.pop(number, None)

    def _scan(self, number: int) -> Iterator[tuple[str, _Place]]:
        with open(self._path(number), "rb", buffering=0) as file:
            at = 0
            while len(head := os.pread(file.fileno(), _BEFORE_BODY, at)) == _BEFORE_BODY:
                if _HEAD_CHECKSUM.pack(crc32c.crc32c(head[: _HEAD.size])) != head[_HEAD.size :]:
                    return
                name, length, checksum = _HEAD.unpack_from(head)
                yield name.rstrip(b"\0").decode(), _Place(number, at + _BEFORE_BODY, length, checksum)
                at += _BEFORE_BODY + length

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:06}.groups"  # a Path's own work is as long as the write


def _write(file: int, *parts: bytes) -> None:
    """Write all of it, where a disk that is nearly full may take a part."""
    written = os.writev(file, parts)
    if written < sum(map(len, parts)):
        left = memoryview(b"".join(parts))[written:]
        while left:
            left = left[os.write(file, left) :]


def _taken_away(path: str) -> StoreError:
    return StoreError(
        f"the queue's store: {path} was deleted, replaced or cut off while the queue ran; start the queue again: "
        f"groups that are gone are sampled again"
    )
