"""The adapters on a server's disk: arriving in chunks, whole ones in folders of their own, old ones removed.

Pure files: what vLLM is told of them is `adapters`' part. The folder is private to the server's process. Nothing in it
is pickled, and no name from outside becomes a path unless it is one of `protocol.versions`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from protocol.versions import version_of

# Before the number of the process that it belongs to.
PREFIX = "slipstream-adapters-"
MAX_FILE_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20
# Arriving at the same time; more are a learner that gave up, and the oldest goes.
MAX_ARRIVING = 2


class StoreError(Exception):
    """What was sent cannot be taken. `status`: the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _Arriving:
    path: Path
    size: int = 0


class AdapterStore:
    """Made once for a server. Folders that earlier processes of this user left behind are removed."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_left(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        self._arriving: dict[str, _Arriving] = {}
        self._whole: dict[str, Path] = {}

    @property
    def whole(self) -> list[str]:
        """The names of those that are there."""
        return list(self._whole)

    def append(self, name: str, start: int, chunk: bytes, digest: str) -> int:
        """Bytes that are there after `chunk`, which begins at byte `start`. digest: the chunk's BLAKE3, hexadecimal.

        A file begins anew at 0. Raises `StoreError`, 409 where bytes are missing before the chunk.
        """
        _checked(name)
        if start == 0:
            self._drop(name)
            while len(self._arriving) >= MAX_ARRIVING:
                self._drop(next(iter(self._arriving)))
            self._arriving[name] = _Arriving(self.folder / f"{name}.part")
            self._arriving[name].path.write_bytes(b"")
        arriving = self._arriving.get(name)
        size = arriving.size if arriving else 0
        if arriving is None or start != size:
            raise StoreError(409, f"{name}: the chunk begins at byte {start}, and {size} bytes are there")
        if size + len(chunk) > MAX_FILE_BYTES:
            raise StoreError(413, f"{name}: larger than {MAX_FILE_BYTES} bytes")
        if blake3(chunk).hexdigest() != digest:
            raise StoreError(400, f"{name}: the chunk at byte {start} was damaged on its way: its digest is another")
        with arriving.path.open("ab") as file:
            file.write(chunk)
        arriving.size += len(chunk)
        return arriving.size

    def complete(self, name: str, config: str, digest: str) -> Path:
        """The folder of an adapter that has arrived, as peft writes one. digest: of the file and `config`.

        Blocks while the file is read. Raises `StoreError`.
        """
        _checked(name)
        if name in self._whole:
            return self._whole[name]
        arriving = self._arriving.get(name)
        if arriving is None:
            raise StoreError(409, f"{name}: nothing of it has arrived")
        if len(config) > MAX_CONFIG_BYTES:
            raise StoreError(413, f"{name}: its configuration is larger than {MAX_CONFIG_BYTES} bytes")
        found = blake3(max_threads=1).update_mmap(arriving.path) if arriving.size else blake3()
        if found.update(config.encode()).hexdigest() != digest or digest[:16] != name.rpartition(".")[2]:
            self._drop(name)
            raise StoreError(400, f"{name}: what arrived has another digest than what was sent")
        if not _is_table(config):
            raise StoreError(400, f"{name}: its configuration is not a JSON object")
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        arriving.path.rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")
        del self._arriving[name]
        self._whole[name] = folder
        return folder

    def keep(self, names: Collection[str]) -> list[str]:
        """Remove all whole adapters but these; gives the names of the removed ones."""
        gone = [name for name in self._whole if name not in names]
        for name in gone:
            shutil.rmtree(self._whole.pop(name), ignore_errors=True)
        return gone

    def remove(self) -> None:
        """The whole folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _drop(self, name: str) -> None:
        arriving = self._arriving.pop(name, None)
        if arriving is not None:
            arriving.path.unlink(missing_ok=True)


def _checked(name: str) -> None:
    if version_of(name) is None:
        raise StoreError(400, f"{name[:80]!r} is not a name of an adapter")


def _is_table(text: str) -> bool:
    try:
        table: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict)


def _remove_left(parent: Path) -> None:
    """Folders of processes that are no more; another user's cannot be removed, and stay."""
    for folder in parent.glob(f"{PREFIX}*"):
        number = folder.name.removeprefix(PREFIX).partition("-")[0]
        if number.isdigit() and not _runs(int(number)):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
