"""The learner's end of the NCCL transport; `engine` is vLLM's own `NCCLWeightTransferEngine`, and an account of it.

vLLM's order of calls, with a control plane of ours: its HTTP client sends no token, and its trainer's end waits without
a deadline. The engine checks no digest of what was sent: what arrived damaged is found by the log-probs of the proof.
"""

from __future__ import annotations

import torch

from protocol.config import WeightSyncSection
from weight_sync.server.control import ServerControl
from weight_sync.server.pause import Pause
from weight_sync.transports.base import Sent
from weight_sync.transports.gpu.communicator import Communicator
from weight_sync.transports.gpu.nccl_sender import Link
from weight_sync.transports.nccl.chunks import chunks, fill, wire_order
from weight_sync.transports.nccl.streams import Gpu
from weight_sync.weights.snapshot import Snapshot


class NcclTransport:
    """See `base.Transport`. One group a server: a server that hangs holds no other."""

    stages = False

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        self._link = Link(section.timeout_s)
        self._gpu: Gpu | None = None
        self._buffer: torch.Tensor | None = None
        self.sent: Sent | None = None

    async def connect(self, server: ServerControl, workers: int) -> None:
        await server.end_transfer()
        self._gpu = await self._link.open(
            server,
            workers,
            lambda gpu: {
                "rank_offset": 1,
                "packed": True,
                "packed_buffer_size_bytes": self._section.bucket_bytes,
                # With more, vLLM's worker reads a buffer on one stream that another fills (NeMo-RL#3545).
                "packed_num_buffers": 1,
            },
        )

    async def publish(self, server: ServerControl, snapshot: Snapshot, pause: Pause) -> None:
        group = self._link.group
        manifest = wire_order(snapshot.manifest)
        update = {"names": manifest.names, "dtype_names": manifest.dtypes, "shapes": manifest.shapes}
        async with pause.held():
            await server.start_update()
            await self._link.beside(server.update(update), self._send, group, snapshot)
            await server.finish_update(snapshot.label)
        self.sent = Sent.of(snapshot)

    async def close(self) -> None:
        await self._link.close()

    def _send(self, group: Communicator, snapshot: Snapshot) -> None:
        assert self._gpu is not None
        cut = list(chunks(wire_order(snapshot.manifest), self._section.bucket_bytes))
        with group.stream.current():
            size = max((chunk.size for chunk in cut), default=0)
            if self._buffer is None or len(self._buffer) < size:
                self._buffer = torch.empty(size, dtype=torch.uint8, device=self._gpu.device)
            for chunk in cut:
                # The stream keeps the order: a chunk is filled after the one before has gone.
                group.broadcast(fill(self._buffer, chunk, snapshot))
            group.wait("the last broadcast")
