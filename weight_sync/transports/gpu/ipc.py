"""The learner's end of the IPC transport: a buffer on its GPU, which the server opens."""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import Any

import torch

from protocol.config import WeightSyncSection
from weight_sync.server.cancellation import on_thread
from weight_sync.server.control import ServerControl
from weight_sync.server.pause import Pause
from weight_sync.transports.base import TransferError
from weight_sync.transports.gpu.nccl_library import NcclError
from weight_sync.transports.ipc import handles
from weight_sync.transports.ipc.handles import Handle
from weight_sync.transports.nccl import streams
from weight_sync.transports.nccl.checksum import checksum
from weight_sync.transports.nccl.streams import Gpu
from weight_sync.transports.staged import StagedTransport
from weight_sync.weights.snapshot import Snapshot


class IpcTransport(StagedTransport):
    """See `StagedTransport`. The buffer is not written to again before the server has copied it."""

    def __init__(self, section: WeightSyncSection) -> None:
        super().__init__(section)
        self._gpu: Gpu | None = None
        self._buffer: torch.Tensor | None = None
        self._handle: Handle | None = None
        self._sum = b""

    @property
    def connected(self) -> bool:
        return self._gpu is not None

    async def connect(self, server: ServerControl, workers: int) -> None:
        if workers != 1:
            raise TransferError(
                f"{server.url} has {workers} workers, each on a GPU of its own, and ipc is for one GPU that learner "
                f"and server are on; set weight_sync.transport = nccl_staged for both ends"
            )
        await server.end_transfer()
        try:
            gpu = await on_thread(streams.own_gpu)
        except NcclError as error:
            raise TransferError(str(error)) from error
        await server.init_transfer({"learner_gpu": gpu.uuid})
        self._gpu = gpu

    def update_info(self, snapshot: Snapshot) -> dict[str, Any]:
        assert self._handle is not None
        return {
            "manifest": snapshot.manifest.as_dict(),
            "handle": asdict(self._handle),
            "checksum": base64.b64encode(self._sum).decode(),
        }

    async def publish(self, server: ServerControl, snapshot: Snapshot, pause: Pause) -> None:
        if self._gpu is None:
            raise TransferError("the transport is not connected")
        await on_thread(self._fill, self._gpu, snapshot)
        await super().publish(server, snapshot, pause)

    async def send(self, server: ServerControl, snapshot: Snapshot) -> None:
        """The server takes them by itself."""

    async def close(self) -> None:
        self._gpu = self._buffer = self._handle = None

    def _fill(self, gpu: Gpu, snapshot: Snapshot) -> None:
        stream = gpu.stream()
        try:
            with stream.current():
                if self._buffer is None or len(self._buffer) != len(snapshot.flat):
                    self._buffer = torch.empty(len(snapshot.flat), dtype=torch.uint8, device=gpu.device)
                    self._handle = handles.export(self._buffer, gpu.uuid)
                self._buffer.copy_(snapshot.flat)
                self._sum = bytes(checksum(self._buffer).cpu().numpy())  # waits for the copy, too
        except RuntimeError as error:
            raise TransferError(
                f"the learner's memory cannot be shared: {error}; where PYTORCH_CUDA_ALLOC_CONF has "
                f"expandable_segments, leave that out"
            ) from error
