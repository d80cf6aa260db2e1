"""The learner's end of the NCCL transports: `NcclTransport` for vLLM's own engine, in place; `NcclSender` for ours,
during generation.

A collective runs on a thread while the server answers the HTTP call that has its workers take part. If either fails the
group is aborted at once, so that the other does not wait for what cannot come (trl#6796, trl#6797). vLLM's HTTP client
is not used: it sends no token, and its trainer's end waits without a deadline. vLLM's engine checks no digest, so only
the proof finds what arrived damaged there.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.cancellation import gather, on_thread, shielded
from slipstream.weight_sync.server.engine import Engine
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import Sender, Sent, TransferError
from slipstream.weight_sync.transports.gpu import communicator
from slipstream.weight_sync.transports.gpu.communicator import Communicator, Gpu
from slipstream.weight_sync.transports.gpu.nccl_library import MAX_BLOCKS
from slipstream.weight_sync.transports.gpu.nccl_receiver import chunks, fill, wire_order
from slipstream.weight_sync.weights.checksum import SIZE, checksum
from slipstream.weight_sync.weights.snapshot import Snapshot


class Link:
    """The learner's place in the group of one server. It cannot be used again after an error or `close`.

    Attributes:
        gpu: This end's GPU, from `open` on.
    """

    gpu: Gpu

    def __init__(self, timeout_s: float, max_blocks: int | None = MAX_BLOCKS) -> None:
        """Prepare to connect. `timeout_s` and `max_blocks` are those of `Communicator`."""
        self._timeout_s = timeout_s
        self._max_blocks = max_blocks
        self._group: Communicator | None = None
        self._unique_id = b""
        self._size = 0
        self._buffer: torch.Tensor | None = None

    @property
    def group(self) -> Communicator:
        """The open group. Raises `TransferError` if not connected."""
        if self._group is None or self._group.ended:
            raise TransferError("the transport is not connected")
        return self._group

    async def open(self, workers: int) -> dict[str, Any]:
        """Prepare a group with the server's workers.

        Returns:
            The fields by which the workers join. They travel by a route that wants the learner's token; without the
            group's id nobody can join.
        """
        self._size = workers + 1
        self.gpu = await on_thread(communicator.own_gpu)
        self._unique_id = await on_thread(self.gpu.library.unique_id)
        self._group = Communicator(self.gpu, self._timeout_s, self._max_blocks)
        return {"nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(), "world_size": self._size}

    def buffer(self, size: int) -> torch.Tensor:
        """Return at least `size` bytes on the GPU, the same memory while they suffice: uint8."""
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.gpu.device)
        return self._buffer

    async def meet(self) -> None:
        """Wait until all workers have joined. Raises `TransferError` if not all came."""
        await self.run(self.group.meet, self._unique_id, self._size, 0)

    async def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run `work(*arguments)`, which uses the group, on a thread. The group ends with an error or a cancellation.

        Raises:
            NcclError: NCCL reported an error.
        """
        group = self.group
        try:
            await on_thread(work, *arguments, cancelled=group.stop)
        except BaseException:
            group.stop()
            await shielded(self.close())
            raise

    async def close(self) -> None:
        """End the group. May be called again."""
        group, self._group = self._group, None
        if group is not None:
            await on_thread(group.abort)


class NcclTransport:
    """See `base.Transport`. One group a server: a server that hangs holds no other."""

    stages = False

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        # The other ranks are vLLM's, which leave the number of blocks to NCCL.
        self._link = Link(section.timeout_s, max_blocks=None)
        self.sent: Sent | None = None

    async def connect(self, server: Engine, workers: int) -> None:
        await server.end_transfer()
        joined = await self._link.open(workers)
        await gather(
            server.init_transfer(
                joined
                | {
                    "rank_offset": 1,
                    "packed": True,
                    "packed_buffer_size_bytes": self._section.bucket_bytes,
                    # With more, vLLM's worker reads a buffer on one stream that another fills (NeMo-RL#3545).
                    "packed_num_buffers": 1,
                }
            ),
            self._link.meet(),
        )

    async def publish(self, server: Engine, snapshot: Snapshot, pause: Pause) -> None:
        group = self._link.group
        manifest = wire_order(snapshot.manifest)
        update = {"names": manifest.names, "dtype_names": manifest.dtypes, "shapes": manifest.shapes}
        async with pause.held():
            await server.start_update()
            await gather(server.update(update), self._link.run(self._send, group, snapshot))
            await server.finish_update(snapshot.label)
        self.sent = Sent.of(snapshot)

    async def close(self) -> None:
        await self._link.close()

    def _send(self, group: Communicator, snapshot: Snapshot) -> None:
        cut = list(chunks(wire_order(snapshot.manifest), self._section.bucket_bytes))
        with group.stream.current():
            buffer = self._link.buffer(max((chunk.size for chunk in cut), default=0))
            for chunk in cut:
                # The stream keeps the order: a chunk is filled after the one before has gone.
                group.broadcast(fill(buffer, chunk, snapshot))
            group.wait("the last broadcast")


class NcclSender(Sender):
    """See `Sender`. One group a server: a server that hangs holds no other."""

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        self._link = Link(section.timeout_s)

    async def open(self, server_url: str, workers: int) -> dict[str, Any]:
        joined, section = await self._link.open(workers), self._section
        uuid = self._link.gpu.uuid
        return joined | {"learner_gpu": uuid, "bucket_bytes": section.bucket_bytes, "timeout_s": section.timeout_s}

    async def meet(self) -> None:
        await self._link.meet()

    async def offer(self, snapshot: Snapshot) -> dict[str, Any]:
        return snapshot.manifest.as_dict()

    async def send(self, snapshot: Snapshot) -> None:
        await self._link.run(self._send, self._link.group, snapshot)

    async def close(self) -> None:
        await self._link.close()

    def _send(self, group: Communicator, snapshot: Snapshot) -> None:
        flat, buckets = snapshot.flat, snapshot.manifest.buckets(self._section.bucket_bytes)
        size = max((bucket.size for bucket in buckets), default=0) + SIZE
        with group.stream.current():
            buffer = self._link.buffer(size)
            for bucket in buckets:
                # The stream keeps the order: the buffer is filled after what it held has gone.
                filled = buffer[: bucket.size + SIZE]
                filled[: bucket.size].copy_(flat[bucket.start : bucket.end], non_blocking=True)
                filled[bucket.size :] = checksum(filled[: bucket.size])
                group.broadcast(filled)
            group.wait("the last broadcast")
