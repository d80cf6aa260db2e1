"""A worker's end: it copies from the learner's memory into its own, verified."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.manifest import Manifest
from weight_sync.transports.base import TransferError
from weight_sync.transports.ipc import handles
from weight_sync.transports.ipc.handles import Handle
from weight_sync.transports.nccl.checksum import checksum
from weight_sync.transports.nccl.streams import Gpu


@dataclass(frozen=True)
class InitInfo:
    """Body of `/init_weight_transfer_engine`. learner_gpu: uuid of the GPU that the weights lie on."""

    learner_gpu: str


@dataclass(frozen=True)
class UpdateInfo:
    """Body of `/update_weights`. manifest and handle: fields of `Manifest` and `Handle`. checksum: base64."""

    manifest: dict[str, Any]
    handle: dict[str, Any]
    checksum: str


class Reception:
    """Keeps the learner's memory open from one update to the next."""

    def __init__(self, gpu: Gpu, info: InitInfo) -> None:
        """Raises `TransferError` where the learner is on another GPU."""
        if gpu.uuid != info.learner_gpu:
            raise TransferError(
                f"the learner is on the GPU {info.learner_gpu} and this server on {gpu.uuid}, and ipc is for one that "
                f"both are on; set weight_sync.transport = nccl_staged for both ends"
            )
        self._gpu = gpu
        self._stream = gpu.stream()
        self._opened: tuple[Handle, torch.Tensor] | None = None

    def receive(self, update: UpdateInfo, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The snapshot's tensors by name, as views of `flat`: uint8 of the manifest's size, on the GPU.

        Raises `TransferError` where they are not what the learner put there.
        """
        handle = Handle(**update.handle)
        try:
            if self._opened is None or self._opened[0] != handle:
                self._opened = None  # the old memory is let go first
                self._opened = handle, handles.opened(handle, self._gpu.device)
            with self._stream.current():
                flat.copy_(self._opened[1][: len(flat)])
                found = bytes(checksum(flat).cpu().numpy())
        except RuntimeError as error:
            raise TransferError(f"the learner's memory cannot be opened: {error}") from error
        if found != base64.b64decode(update.checksum):
            raise TransferError("the checksum of what was copied is not the learner's")
        return Manifest(**update.manifest).views(flat)

    def close(self) -> None:
        """Let go of the learner's memory; may be called again."""
        self._opened = None
