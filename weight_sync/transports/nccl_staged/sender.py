"""The learner's end of the staged NCCL transport."""

from __future__ import annotations

import torch

from protocol.config import WeightSyncSection
from weight_sync.server.control import ServerControl
from weight_sync.transports.base import TransferError
from weight_sync.transports.gpu.communicator import Communicator
from weight_sync.transports.gpu.nccl_receiver import buckets
from weight_sync.transports.gpu.nccl_sender import Link
from weight_sync.transports.nccl.checksum import SIZE, checksum
from weight_sync.transports.nccl.streams import Gpu
from weight_sync.transports.staged import StagedTransport
from weight_sync.weights.snapshot import Snapshot

# Between two looks at whether the workers still receive.
WATCH_EVERY_S = 1.0


class NcclStagedTransport(StagedTransport):
    """See `StagedTransport`. One group a server: a server that hangs holds no other."""

    def __init__(self, section: WeightSyncSection) -> None:
        super().__init__(section)
        self._link = Link(section.timeout_s)
        self._gpu: Gpu | None = None
        self._buffer: torch.Tensor | None = None

    @property
    def connected(self) -> bool:
        return self._link.connected

    async def connect(self, server: ServerControl, workers: int) -> None:
        await server.end_transfer()
        section = self._section
        self._gpu = await self._link.open(
            server,
            workers,
            lambda gpu: {
                "learner_gpu": gpu.uuid,
                "bucket_bytes": section.bucket_bytes,
                "timeout_s": section.timeout_s,
            },
        )

    async def send(self, server: ServerControl, snapshot: Snapshot) -> None:
        await self._link.beside(self._received(server), self._send, self._link.group, snapshot)

    async def close(self) -> None:
        await self._link.close()

    async def _received(self, server: ServerControl) -> None:
        """Until no worker receives any more. Raises `TransferError` when one has failed: nobody waits for it then."""
        while True:
            staged = await server.staged(WATCH_EVERY_S)
            if staged.stage == "failed":
                raise TransferError(f"{server.url}: the weights were not staged: {staged.error}")
            if staged.stage != "receiving":
                return

    def _send(self, group: Communicator, snapshot: Snapshot) -> None:
        assert self._gpu is not None
        parts = list(buckets(snapshot.flat, self._section.bucket_bytes))
        with group.stream.current():
            if self._buffer is None:
                self._buffer = torch.empty(self._section.bucket_bytes, dtype=torch.uint8, device=self._gpu.device)
            sums = torch.empty(SIZE * len(parts), dtype=torch.uint8, device=self._gpu.device)
            for i, part in enumerate(parts):
                # The stream keeps the order: the buffer is filled after what it held has gone.
                filled = self._buffer[: len(part)]
                filled.copy_(part, non_blocking=True)
                sums[SIZE * i : SIZE * (i + 1)] = checksum(filled)
                group.broadcast(filled)
            group.broadcast(sums)
            group.wait("the last broadcast")
