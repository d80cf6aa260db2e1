"""The server's routes for adapters, a part of `ServerControl`; see `weight_sync.vllm.adapters` for what they do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = "/slipstream/adapters"


class AdapterRoutes(ABC):
    """Every call raises `ControlError`."""

    async def adapters(self) -> dict[str, Any]:
        """What the server says of its adapters: `enabled`, `max_rank`, `served`, `loaded`."""
        reply: dict[str, Any] = await self._call("GET", ROOT)
        return reply

    async def put_adapter(self, name: str, start: int, chunk: bytes, digest: str) -> None:
        """A chunk of an adapter's file, from byte `start`. digest: its BLAKE3, hexadecimal."""
        await self._call("PUT", f"{ROOT}/{name}?start={start}&blake3={digest}", data=chunk)

    async def load_adapter(self, name: str, config: str, digest: str) -> None:
        """Load what has arrived; it serves nobody yet. digest: of the file and `config`."""
        await self._call("POST", f"{ROOT}/{name}/load", {"config": config, "blake3": digest})

    async def serve_adapter(self, name: str) -> None:
        """Name the adapter to whoever samples."""
        await self._call("POST", f"{ROOT}/{name}/serve", {})

    async def score_adapter(self, name: str, sequences: list[list[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs float32 [T-1] of each of `sequences` [T] under a loaded adapter, computed beside generation."""
        return await self._scores(f"{ROOT}/{name}/score", sequences)

    async def adapter_layers(self, name: str) -> dict[str, Any]:
        """What the layers of a loaded adapter hold; the answer is that of `ServerControl.layers`."""
        reply: dict[str, Any] = await self._call("POST", f"{ROOT}/{name}/layers", {})
        return reply

    @abstractmethod
    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, data: bytes | None = None
    ) -> Any: ...

    @abstractmethod
    async def _scores(self, path: str, sequences: list[list[int]]) -> list[npt.NDArray[np.float32]]: ...
