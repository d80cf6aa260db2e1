"""Shares one staging buffer among the workers of a host: one of them fills it and the others map it.

The buffer is anonymous shared memory (memfd): it needs no room in /dev/shm and is gone with the last process that maps
it. A small record in a folder of this user names the process that holds the buffer, and its content. A lock next to it
names the process that fills it, and is released if that process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.weights.host_memory import map_file

LOOK_EVERY_S = 0.02
_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Record:
    """Names a buffer and its content.

    Attributes:
        pid: Process that holds the buffer, under its file descriptor `fd`.
        holds: Root of its chunks, "" while it is being filled or after that broke off.
        digests: Digests of its chunks.
        secret_hash: BLAKE3 of the secret that a request for its bytes must bring.
        mbytes_per_s: Bound on what the server passes on of it, in 10**6 bytes per second; 0 for none.
        part_of: Root of the chunks of which a part is there, "" if no reception broke off.
        begun: Index of each chunk of which a part is there, and how many bytes at its front.
    """

    pid: int
    fd: int
    total_bytes: int
    holds: str = ""
    chunk_bytes: int = 0
    digests: list[str] = field(default_factory=list)
    secret_hash: str = ""
    mbytes_per_s: float = 0.0
    part_of: str = ""
    begun: list[tuple[int, int]] = field(default_factory=list)

    def open(self) -> int:
        """Open a file descriptor of the buffer. Raises OSError if the process that held it is gone."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size != self.total_bytes:
            os.close(fd)
            raise OSError("the buffer has another size than its record says")
        return fd


def record_of(key: str) -> Record | None:
    """Read the record of the transfer `key`; None if there is none that can be read."""
    if not _KEY.fullmatch(key):
        return None
    try:
        return Record(**json.loads((_folder() / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


class BrokeOff(TransferError):
    """A part is there, with which another reception of the same blob can begin.

    Attributes:
        begun: Bytes at the front of chunks that are not whole, by index.
    """

    def __init__(self, text: str, begun: dict[int, int]) -> None:
        super().__init__(text)
        self.begun = begun


# Fills the buffer with the wanted blob. Takes the buffer and its record as it was (None: fresh memory).
Fill = Callable[[torch.Tensor, Record | None], None]


class SharedStaging:
    """The buffer of one transfer, as one worker sees it.

    Args:
        key: Name of the transfer, 16 hex digits.
        device: As in `host_memory.fresh`.
    """

    def __init__(self, key: str, device: torch.device | None = None) -> None:
        if not _KEY.fullmatch(key):
            raise ValueError(f"transfer key {key!r}: must be 16 hex digits")
        _sweep()
        self._key = key
        self._device = device
        self._fd: int | None = None
        self._flat: torch.Tensor | None = None

    def receive(self, wanted: Record, fill: Fill, timeout_s: float) -> torch.Tensor:
        """Return the buffer with `wanted.holds` in it, filled here if no other worker has done it.

        Returns:
            uint8 [wanted.total_bytes].

        Raises:
            TransferError: Another worker has been filling it for `timeout_s` seconds. Errors of `fill` propagate.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock() as mine:
                if mine:
                    return self._receive_alone(wanted, fill)
            if time.monotonic() >= deadline:
                raise TransferError(f"another worker of this host has been pulling for {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def close(self) -> None:
        """Release the buffer and its record; views of it stay good. Never raises."""
        with contextlib.suppress(OSError), self._lock() as mine:
            if mine:
                for suffix in (".json", ".lock"):
                    (_folder() / (self._key + suffix)).unlink(missing_ok=True)
        self._forget()

    def forget_buffer(self) -> None:
        """Never uses the present memory again: something may still write into it."""
        with contextlib.suppress(OSError):
            (_folder() / f"{self._key}.json").unlink(missing_ok=True)
        self._forget()

    def _receive_alone(self, wanted: Record, fill: Fill) -> torch.Tensor:
        found = record_of(self._key)
        before = self._map(found, wanted.total_bytes)
        assert self._flat is not None
        assert self._fd is not None
        if before is not None and before.holds == wanted.holds:
            return self._flat
        pid, fd, flat = os.getpid(), self._fd, self._flat
        filling = Record(pid, fd, wanted.total_bytes)
        self._write(filling)
        try:
            fill(flat, before)
        except BrokeOff as error:
            self._write(replace(filling, part_of=wanted.holds, begun=[*error.begun.items()]))
            raise
        self._write(replace(wanted, pid=pid, fd=fd))
        return flat

    def _map(self, found: Record | None, size: int) -> Record | None:
        """Map the buffer that `found` names, or a fresh one. Returns `found` if its buffer could be mapped."""
        if found is not None and found.total_bytes == size:
            if self._flat is not None and found.pid == os.getpid() and found.fd == self._fd:
                return found
            try:
                self._take(found.open(), size)
            except OSError:
                pass  # The process that held it is gone.
            else:
                return found
        fd = os.memfd_create(f"slipstream-{self._key}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._take(fd, size)
        return None

    def _take(self, fd: int, size: int) -> None:
        self._forget()
        self._fd = fd
        self._flat = map_file(fd, size, self._device) if size else torch.empty(0).byte()

    def _forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._flat = None

    def _write(self, record: Record) -> None:
        path = _folder() / f"{self._key}.json"
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(record)))
        fresh.replace(path)

    def _lock(self) -> AbstractContextManager[bool]:
        """Hold whether this worker alone may fill the buffer."""
        return _locked(_folder() / f"{self._key}.lock")


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yield whether this process has the lock. Its holder may remove the file, which is no lock from then on."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(fd).st_nlink > 0
        except BlockingIOError:
            mine = False
        yield mine
    finally:
        os.close(fd)


def _sweep() -> None:
    """Remove what killed processes left: their records, and locks that nobody holds."""
    folder = _folder()
    for key in {path.stem for suffix in ("json", "lock") for path in folder.glob(f"*.{suffix}")}:
        record = record_of(key)
        if record is not None and Path(f"/proc/{record.pid}").exists():
            continue
        with _locked(folder / f"{key}.lock") as mine:
            if mine:
                for suffix in ("json", "lock"):
                    (folder / f"{key}.{suffix}").unlink(missing_ok=True)


def _folder() -> Path:
    """Return this user's folder of records. Raises OSError if another user has made it."""
    folder = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user can read; remove it or set TMPDIR")
    return folder
