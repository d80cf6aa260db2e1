"""Keeps adapters on a server's disk: chunks as they arrive, whole adapters in folders of their own.

Only files are handled here; `loaded_adapters` tells vLLM of them. The folder is private to the server's process.
Nothing in it is pickled, and a name from outside becomes a path only if it is one of `protocol.versions` (I8).
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

import psutil
from blake3 import blake3

from slipstream.protocol.versions import version_of
from slipstream.weight_sync.vllm.engine_state import RouteError

# Prefix of the folder's name; the id of its process follows.
PREFIX = "slipstream-adapters-"
MAX_FILE_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20
# Adapters that arrive at once. More mean that a learner gave up, so the oldest is dropped.
MAX_ARRIVING = 2


@dataclass
class _Arriving:
    path: Path
    size: int = 0


class AdapterStore:
    """The adapters of one server. Removes folders that earlier processes of this user left behind."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_leftovers(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        self._arriving: dict[str, _Arriving] = {}
        self._whole: dict[str, Path] = {}

    @property
    def whole(self) -> list[str]:
        """Names of the adapters that have arrived whole."""
        return list(self._whole)

    def append(self, name: str, start: int, chunk: bytes, digest: str) -> int:
        """Append a chunk. One that starts at 0 begins the file again.

        Args:
            start: Position of the chunk's first byte.
            digest: The chunk's BLAKE3, in hex.

        Returns:
            Bytes of the file that have arrived.

        Raises:
            RouteError: 409 if bytes before the chunk are missing; 400 or 413 if it is damaged or too large.
        """
        _check_name(name)
        if start == 0:
            self._drop(name)
            while len(self._arriving) >= MAX_ARRIVING:
                self._drop(next(iter(self._arriving)))
            self._arriving[name] = _Arriving(self.folder / f"{name}.part")
            self._arriving[name].path.write_bytes(b"")
        arriving = self._arriving.get(name)
        size = arriving.size if arriving else 0
        if arriving is None or start != size:
            raise RouteError(409, f"{name}: the chunk begins at byte {start}, and {size} bytes are there")
        if size + len(chunk) > MAX_FILE_BYTES:
            raise RouteError(413, f"{name}: larger than {MAX_FILE_BYTES} bytes")
        if blake3(chunk).hexdigest() != digest:
            raise RouteError(400, f"{name}: the chunk at byte {start} was damaged on its way: its digest is another")
        with arriving.path.open("ab") as file:
            file.write(chunk)
        arriving.size += len(chunk)
        return arriving.size

    def complete(self, name: str, config: str, digest: str) -> Path:
        """Verify an adapter that has arrived. Blocks while its file is read.

        Args:
            config: Content of `adapter_config.json`.
            digest: `adapter_digest` of the file and `config`.

        Returns:
            Its folder, laid out as peft does.

        Raises:
            RouteError: It has not arrived whole, or is not the one that its name says.
        """
        _check_name(name)
        if name in self._whole:
            return self._whole[name]
        arriving = self._arriving.get(name)
        if arriving is None:
            raise RouteError(409, f"{name}: nothing of it has arrived")
        if len(config) > MAX_CONFIG_BYTES:
            raise RouteError(413, f"{name}: its configuration is larger than {MAX_CONFIG_BYTES} bytes")
        found = blake3(max_threads=1).update_mmap(arriving.path) if arriving.size else blake3()
        if found.update(config.encode()).hexdigest() != digest or digest[:16] != name.rpartition(".")[2]:
            self._drop(name)
            raise RouteError(400, f"{name}: the file that arrived has another digest than the one sent")
        if not _is_table(config):
            raise RouteError(400, f"{name}: its configuration is not a JSON object")
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        arriving.path.rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")
        del self._arriving[name]
        self._whole[name] = folder
        return folder

    def keep(self, names: Collection[str]) -> list[str]:
        """Remove all whole adapters except `names`. Returns the names of those removed."""
        gone = [name for name in self._whole if name not in names]
        for name in gone:
            shutil.rmtree(self._whole.pop(name), ignore_errors=True)
        return gone

    def remove(self) -> None:
        """Remove the whole folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _drop(self, name: str) -> None:
        arriving = self._arriving.pop(name, None)
        if arriving is not None:
            arriving.path.unlink(missing_ok=True)


def _check_name(name: str) -> None:
    if version_of(name) is None:
        raise RouteError(400, f"{name[:80]!r} is not a name of an adapter")


def _is_table(text: str) -> bool:
    try:
        table: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict)


def _remove_leftovers(parent: Path) -> None:
    """Remove folders of processes that have ended; another user's stay."""
    for folder in parent.glob(f"{PREFIX}*"):
        number = folder.name.removeprefix(PREFIX).partition("-")[0]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
