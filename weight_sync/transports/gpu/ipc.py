"""The ipc transport: a buffer on the learner's GPU, which the one worker of a server on the same GPU opens and copies.

The buffer is named by plain values, so nothing is pickled (I8). A checksum verifies each copy.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass
from typing import Any

import torch

from protocol.config import WeightSyncSection
from weight_sync.server.cancellation import on_thread
from weight_sync.server.control import ServerControl
from weight_sync.server.pause import Pause
from weight_sync.transports.base import StagedTransport, TransferError
from weight_sync.transports.gpu import communicator
from weight_sync.transports.gpu.communicator import Gpu
from weight_sync.transports.gpu.nccl_library import NcclError
from weight_sync.transports.gpu.nccl_receiver import checksum
from weight_sync.weights.manifest import Manifest
from weight_sync.weights.snapshot import Snapshot


@dataclass(frozen=True)
class Handle:
    """Names a tensor's memory on a GPU so that another process can open it, as torch's storage exports it.

    Attributes:
        gpu: UUID of the GPU. Bytes in the other fields are base64, sizes are in bytes.
    """

    gpu: str
    memory: str
    size: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    event_wait: bool


def export_storage(tensor: torch.Tensor, gpu: str) -> Handle:
    """Export the whole storage of `tensor`, once: torch counts one opener for each export. Raises RuntimeError."""
    storage: Any = tensor.untyped_storage()
    _, memory, size, offset, counter, counter_offset, event, event_wait = storage._share_cuda_()
    return Handle(gpu, _text(memory), size, offset, _text(counter), counter_offset, _text(event), bool(event_wait))


def open_storage(handle: Handle, device: torch.device) -> torch.Tensor:
    """Open another process's memory as uint8 [handle.size], for as long as the tensor lives. Raises RuntimeError."""
    make: Any = torch.UntypedStorage
    storage = make._new_shared_cuda(
        device.index or 0,
        _bytes(handle.memory),
        handle.size,
        handle.offset,
        _bytes(handle.counter),
        handle.counter_offset,
        _bytes(handle.event),
        handle.event_wait,
    )
    memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return memory


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class IpcTransport(StagedTransport):
    """The learner's end. See `StagedTransport`. The buffer is not filled again before the server has copied it."""

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
            gpu = await on_thread(communicator.own_gpu)
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
        """Do nothing: the worker copies the bytes itself."""

    async def close(self) -> None:
        self._gpu = self._buffer = self._handle = None

    def _fill(self, gpu: Gpu, snapshot: Snapshot) -> None:
        stream = gpu.stream()
        try:
            with stream.current():
                if self._buffer is None or len(self._buffer) != len(snapshot.flat):
                    self._buffer = torch.empty(len(snapshot.flat), dtype=torch.uint8, device=gpu.device)
                    self._handle = export_storage(self._buffer, gpu.uuid)
                self._buffer.copy_(snapshot.flat)
                self._sum = bytes(checksum(self._buffer).cpu().numpy())  # waits for the copy, too
        except RuntimeError as error:
            raise TransferError(
                f"the learner's memory cannot be shared: {error}; where PYTORCH_CUDA_ALLOC_CONF has "
                f"expandable_segments, leave that out"
            ) from error


@dataclass(frozen=True)
class IpcInitInfo:
    """Body of `/init_weight_transfer_engine`. `learner_gpu` is the UUID of the GPU that holds the weights."""

    learner_gpu: str


@dataclass(frozen=True)
class IpcUpdateInfo:
    """Body of `/update_weights`: the fields of `Manifest` and `Handle`, and the checksum in base64."""

    manifest: dict[str, Any]
    handle: dict[str, Any]
    checksum: str


class IpcReceiver:
    """The worker's end. Keeps the learner's memory open from one update to the next."""

    def __init__(self, gpu: Gpu, info: IpcInitInfo) -> None:
        """Prepare to receive. Raises `TransferError` if the learner is on another GPU."""
        if gpu.uuid != info.learner_gpu:
            raise TransferError(
                f"the learner is on the GPU {info.learner_gpu} and this server on {gpu.uuid}, and ipc is for one that "
                f"both are on; set weight_sync.transport = nccl_staged for both ends"
            )
        self._gpu = gpu
        self._stream = gpu.stream()
        self._opened: tuple[Handle, torch.Tensor] | None = None

    def receive(self, update: IpcUpdateInfo, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copy a snapshot into `flat`: uint8 of the manifest's size, on the GPU.

        Returns:
            Its tensors by name, as views of `flat`.

        Raises:
            TransferError: The copy differs from the learner's buffer.
        """
        handle = Handle(**update.handle)
        try:
            if self._opened is None or self._opened[0] != handle:
                self._opened = None  # the old memory is let go first
                self._opened = handle, open_storage(handle, self._gpu.device)
            with self._stream.current():
                flat.copy_(self._opened[1][: len(flat)])
                found = bytes(checksum(flat).cpu().numpy())
        except RuntimeError as error:
            raise TransferError(f"the learner's memory cannot be opened: {error}") from error
        if found != base64.b64decode(update.checksum):
            raise TransferError("the checksum of what was copied is not the learner's")
        return Manifest(**update.manifest).views(flat)

    def close(self) -> None:
        """Close the learner's memory. May be called again."""
        self._opened = None
