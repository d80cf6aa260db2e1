"""A worker's end: it joins the learner's group and receives on a stream and a thread of its own, beside generation."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weight_sync.manifest import Manifest
from weight_sync.transports.base import TransferError
from weight_sync.transports.gpu.communicator import Communicator
from weight_sync.transports.gpu.nccl_library import NcclError
from weight_sync.transports.nccl.checksum import SIZE, checksum
from weight_sync.transports.nccl.streams import Gpu


@dataclass(frozen=True)
class NcclInitInfo:
    """Body of `/init_weight_transfer_engine`. learner_gpu: uuid of the GPU that sends. bucket_bytes: of one broadcast.
    timeout_s: of each wait."""

    nccl_unique_id_b64: str
    world_size: int
    learner_gpu: str
    bucket_bytes: int
    timeout_s: float


class NcclReceiver:
    """The worker's place in a group. Begins to join at once, and receives one snapshot at a time."""

    def __init__(self, gpu: Gpu, info: NcclInitInfo, rank: int) -> None:
        """Raises `TransferError` where the learner is on the same GPU, which NCCL cannot do."""
        if gpu.uuid == info.learner_gpu:
            raise TransferError(
                f"learner and server share the GPU {gpu.uuid}, and NCCL joins no two processes on one; set "
                f"weight_sync.transport = ipc for both ends"
            )
        self._info = info
        self._group = Communicator(gpu, info.timeout_s)
        self._error: str | None = None
        # The engine's loop, which calls this, must not stand still until the learner has come.
        self._joining = threading.Thread(target=self._join, args=(rank,), name="nccl-join", daemon=True)
        self._joining.start()

    def receive(self, manifest: Manifest, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The snapshot's tensors by name, as views of `flat`: uint8 [manifest.total_bytes()], on the GPU.

        Raises `TransferError` where they do not arrive whole, or the learner is gone or late.
        """
        self._joining.join(self._info.timeout_s)
        if self._error is not None or self._joining.is_alive():
            raise TransferError(f"the learner's group was not joined: {self._error or 'still waiting'}")
        parts = list(buckets(flat, self._info.bucket_bytes))
        try:
            with self._group.stream.current():
                sums = torch.empty(SIZE * len(parts), dtype=torch.uint8, device=flat.device)
                for part in (*parts, sums):
                    self._group.broadcast(part)
                self._group.wait("the last broadcast")
                own = [checksum(part) for part in parts]
                damaged = [i for i, one in enumerate(own) if not torch.equal(one, sums[SIZE * i : SIZE * (i + 1)])]
        except NcclError as error:
            raise TransferError(f"the transfer broke off: {error}") from error
        if damaged:
            raise TransferError(
                f"the checksum of part {damaged[0]} of {len(parts)} is not the learner's: it arrived damaged"
            )
        return manifest.views(flat)

    def close(self) -> None:
        """Leave the group; a reception that is under way raises. May be called again."""
        self._group.abort()

    def _join(self, rank: int) -> None:
        try:
            unique_id = base64.b64decode(self._info.nccl_unique_id_b64)
            self._group.meet(unique_id, self._info.world_size, rank)
        except Exception as error:  # told to who wants to receive
            self._error = str(error)


def buckets(flat: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Views of uint8 [n], in order."""
    for start in range(0, len(flat), most_bytes):
        yield flat[start : start + most_bytes]
