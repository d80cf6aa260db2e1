"""The learner's end of the NCCL transports: `NcclTransport` for vLLM's own engine, in place; `NcclStagedTransport` for
ours, beside generation.

A collective runs on a thread while the server answers the HTTP call that has its workers take part. If either fails the
group is aborted at once, so that the other does not wait for what cannot come (trl#6796, trl#6797). vLLM's HTTP client
is not used: it sends no token, and its trainer's end waits without a deadline. vLLM's engine checks no digest, so only
the proof finds what arrived damaged there.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from protocol.config import WeightSyncSection
from weight_sync.server.cancellation import gather, on_thread
from weight_sync.server.control import ControlError, ServerControl
from weight_sync.server.pause import Pause
from weight_sync.transports.base import Sent, StagedTransport, TransferError
from weight_sync.transports.gpu import communicator
from weight_sync.transports.gpu.communicator import Communicator, Gpu
from weight_sync.transports.gpu.nccl_library import MAX_BLOCKS, NcclError
from weight_sync.transports.gpu.nccl_receiver import SIZE, buckets, checksum, chunks, fill, wire_order
from weight_sync.weights.snapshot import Snapshot

# Seconds between two looks whether the workers still receive.
WATCH_EVERY_S = 1.0


class Link:
    """The learner's place in the group of one server. It cannot be used again after an error or `close`."""

    def __init__(self, timeout_s: float, max_blocks: int | None = MAX_BLOCKS) -> None:
        """Prepare to connect. `timeout_s` and `max_blocks` are those of `Communicator`."""
        self._timeout_s = timeout_s
        self._max_blocks = max_blocks
        self._group: Communicator | None = None

    @property
    def group(self) -> Communicator:
        """The open group. Raises `TransferError` if not connected."""
        if self._group is None or self._group.ended:
            raise TransferError("the transport is not connected")
        return self._group

    @property
    def connected(self) -> bool:
        return self._group is not None and not self._group.ended

    async def open(
        self, server: ServerControl, workers: int, info: Callable[[communicator.Gpu], dict[str, Any]]
    ) -> communicator.Gpu:
        """Form a group with the server's workers.

        The group's id travels by a route that wants the learner's token; without the id nobody can join.

        Args:
            info: Returns further fields of the workers' `init_info`, given this end's GPU.

        Raises:
            ControlError: A call to the server failed.
            TransferError: Not all workers came.
        """
        size = workers + 1
        try:
            gpu = await on_thread(communicator.own_gpu)
            unique_id = await on_thread(gpu.library.unique_id)
            self._group = group = Communicator(gpu, self._timeout_s, self._max_blocks)
        except NcclError as error:
            raise TransferError(str(error)) from error
        named = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "world_size": size,
            **info(gpu),
        }
        await self.beside(server.init_transfer(named), group.meet, unique_id, size, 0)
        return gpu

    async def beside(self, call: Coroutine[Any, Any, None], work: Callable[..., None], *arguments: Any) -> None:
        """Run `work(*arguments)`, which uses the group, on a thread while the server answers `call`."""
        group = self._group
        assert group is not None

        async def asked() -> None:
            try:
                await call
            except BaseException:
                group.stop()
                raise

        def worked() -> None:
            try:
                work(*arguments)
            except NcclError as error:
                raise TransferError(f"the transfer broke off: {error}") from error
            except BaseException:
                group.stop()
                raise

        try:
            await gather(asked(), on_thread(worked))
        except (ControlError, TransferError):
            await self.close()
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
        """Wait until no worker receives any more. Raises `TransferError` at once if one has failed."""
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
