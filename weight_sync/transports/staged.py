"""The order that all staged transports share: everything beside generation, then one call that swaps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from protocol.config import WeightSyncSection
from weight_sync.server.control import ServerControl
from weight_sync.server.pause import Pause
from weight_sync.transports.base import Sent, TransferError
from weight_sync.weights.snapshot import Snapshot


class StagedTransport(ABC):
    """See `base.Transport`. A transport gives `connected`, `connect`, `send` and `close`."""

    stages = True

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        self.sent: Sent | None = None

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @abstractmethod
    async def connect(self, server: ServerControl, workers: int) -> None: ...

    async def send(self, server: ServerControl, snapshot: Snapshot) -> None:
        """Bring the bytes to all workers, which have begun to receive. Raises `ControlError` or `TransferError`.

        For those that leave `bring` as it is.
        """
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None: ...

    def update_info(self, snapshot: Snapshot) -> dict[str, Any]:
        """What the engines are told before the bytes come."""
        return snapshot.manifest.as_dict()

    async def publish(self, server: ServerControl, snapshot: Snapshot, pause: Pause) -> None:
        if not self.connected:
            raise TransferError("the transport is not connected")
        await server.start_update()
        await self.bring(server, snapshot)
        await pause.until_due()
        swap = await server.swap(snapshot.label, pause.clear_cache)
        pause.seconds += swap.pause_s

    async def bring(self, server: ServerControl, snapshot: Snapshot) -> None:
        """Returns when every worker has the snapshot built beside its live model."""
        # The engine answers at once, and receives and builds on a thread of its own.
        await server.update(self.update_info(snapshot))
        await self.send(server, snapshot)
        await self._until_staged(server)
        self.sent = Sent.of(snapshot)

    async def _until_staged(self, server: ServerControl) -> None:
        """Raises `TransferError` where a worker fails, or is not ready `weight_sync.timeout_s` after the last byte."""
        timeout_s = self._section.timeout_s
        ends = time.monotonic() + timeout_s
        while True:
            staged = await server.staged(max(0.0, min(ends - time.monotonic(), timeout_s / 2)))
            if staged.stage == "ready":
                return
            if staged.stage == "failed":
                raise TransferError(f"{server.url}: the weights were not staged: {staged.error}")
            if time.monotonic() >= ends:
                raise TransferError(
                    f"{server.url}: still {staged.stage} after weight_sync.timeout_s = {timeout_s:g} s; raise it for a "
                    f"model that takes longer to build"
                )
