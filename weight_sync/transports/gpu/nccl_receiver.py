"""A worker's end of the staged NCCL transport, and the layouts that both NCCL transports share.

A worker joins the learner's group and receives on its own stream, during generation. A checksum,
computed where the bytes lie, finds damage; it is no defence against anyone who means harm. `chunks` cuts tensors as
vLLM's own NCCL engine does (vllm 0.32, `packed_tensor.py`): both ends cut by themselves, so order, types and shapes
must be the same.
"""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.gpu import communicator
from slipstream.weight_sync.transports.gpu.communicator import Communicator
from slipstream.weight_sync.transports.receiver import DeviceBuffers, Share, Worker, in_turn
from slipstream.weight_sync.weights.checksum import SIZE, checksum
from slipstream.weight_sync.weights.manifest import Bucket, Manifest
from slipstream.weight_sync.weights.snapshot import Snapshot


@dataclass(frozen=True)
class NcclInitInfo:
    """Body of `/init_weight_transfer_engine`.

    Attributes:
        learner_gpu: UUID of the GPU that sends.
        bucket_bytes: Bytes of one broadcast.
        timeout_s: Bound on each wait, in seconds.
    """

    nccl_unique_id_b64: str
    world_size: int
    learner_gpu: str
    bucket_bytes: int
    timeout_s: float


class NcclReceiver:
    """See `Receiver`. Begins to join the group at once, and receives one snapshot at a time."""

    # The newest thread that joins, by the worker's rank.
    _joins: ClassVar[dict[int, threading.Thread]] = {}

    def __init__(self, info: dict[str, Any], worker: Worker) -> None:
        """Begin to join. Raises `TransferError` if the learner is on the same GPU, which NCCL cannot do."""
        self._info = joined = NcclInitInfo(**info)
        gpu = communicator.own_gpu(worker.device)
        if gpu.uuid == joined.learner_gpu:
            raise TransferError(
                f"learner and server share the GPU {gpu.uuid}, and NCCL joins no two processes on one; set "
                f"weight_sync.transport = ipc for both ends"
            )
        self._group = Communicator(gpu, joined.timeout_s)
        self._buffers = DeviceBuffers(gpu.device)
        self._error: str | None = None
        # The engine's loop, which calls this, must not stand still until the learner has come. All workers join the
        # ranks' groups in one order: NCCL may wait for the device in one group while another waits for a peer.
        arguments = (NcclReceiver._joins.get(worker.rank), worker.rank)
        self._joining = threading.Thread(target=self._join, args=arguments, name="nccl-join", daemon=True)
        NcclReceiver._joins[worker.rank] = self._joining
        self._joining.start()

    def receive(self, update: dict[str, Any]) -> Share:
        """Begin to receive a snapshot, into two buffers on the GPU. Its checksum travels behind each bucket.

        Raises:
            TransferError: A bucket did not arrive whole, or the learner is gone or late.
        """
        self._joining.join(self._info.timeout_s)
        if self._error is not None or self._joining.is_alive():
            raise TransferError(f"the learner's group was not joined: {self._error or 'still waiting'}")
        manifest = Manifest(**update)
        buckets = manifest.buckets(self._info.bucket_bytes)
        return Share(manifest, in_turn(buckets, self._buffers.take, self._begin, trailer=SIZE))

    def _begin(self, number: int, bucket: Bucket, buffer: torch.Tensor) -> Callable[[], None]:
        with self._group.stream.current():
            self._group.broadcast(buffer)
            done = self._group.stream.mark()

        def wait() -> None:
            self._group.wait(f"bucket {number}", done)
            # On the caller's stream: on the group's it would wait for the next bucket.
            if not torch.equal(checksum(buffer[: bucket.size]), buffer[bucket.size :]):
                raise TransferError(f"the checksum of bucket {number} is not the learner's: it arrived damaged")

        return wait

    def close(self) -> None:
        """Leave the group. A running reception raises. May be called again."""
        self._group.abort()

    def _join(self, before: threading.Thread | None, rank: int) -> None:
        try:
            if before is not None:
                before.join(self._info.timeout_s)
            unique_id = base64.b64decode(self._info.nccl_unique_id_b64)
            self._group.meet(unique_id, self._info.world_size, rank)
        except Exception as error:  # `receive` raises it.
            self._error = str(error)


@dataclass(frozen=True)
class Chunk:
    """Tensors by name that travel as one broadcast of `size` bytes."""

    names: list[str]
    size: int


def wire_order(manifest: Manifest) -> Manifest:
    """Sort tensors by width of their type, widest first, so that each is aligned when they are packed without gaps.

    Within a type they keep their order, so that the parts of a fused layer stay together.
    """
    widths = [getattr(torch, dtype).itemsize for dtype in manifest.dtypes]
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    return Manifest(
        [manifest.names[i] for i in order],
        [manifest.dtypes[i] for i in order],
        [manifest.shapes[i] for i in order],
    )


def chunks(manifest: Manifest, max_bytes: int) -> Iterator[Chunk]:
    """Cut as vLLM does: a chunk ends with the tensor with which it passes `max_bytes`."""
    names: list[str] = []
    size = 0
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        names.append(name)
        size += getattr(torch, dtype).itemsize * math.prod(shape)
        if size > max_bytes:
            yield Chunk(names, size)
            names, size = [], 0
    if names:
        yield Chunk(names, size)


def fill(buffer: torch.Tensor, chunk: Chunk, snapshot: Snapshot) -> torch.Tensor:
    """Copy the chunk's tensors into `buffer` (uint8, any device) on the current stream. Returns the filled part."""
    views = snapshot.manifest.views(snapshot.flat)
    start = 0
    for name in chunk.names:
        data = views[name].reshape(-1).view(torch.uint8)
        buffer[start : start + len(data)].copy_(data, non_blocking=True)
        start += len(data)
    return buffer[:start]
