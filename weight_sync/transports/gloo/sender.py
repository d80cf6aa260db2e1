"""The learner's end of the gloo transport; `engine` is vLLM's."""

from __future__ import annotations

import socket
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from protocol.config import WeightSyncSection
from weight_sync.cancellation import on_thread, together
from weight_sync.server_control import ServerControl
from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import TransferError
from weight_sync.transports.gloo.group import OK, GlooGroup, InitInfo, dist
from weight_sync.transports.staged import StagedTransport


class GlooTransport(StagedTransport):
    """See `StagedTransport`. Blocking calls of gloo run on threads.

    The rendezvous and gloo's own connections know no authentication: anyone who reaches `weight_sync.host` while a
    server is being connected can take a worker's place. Let it be an address in a network of the run's machines alone.
    """

    def __init__(self, section: WeightSyncSection) -> None:
        super().__init__(section)
        self._store: Any = None
        self._group: GlooGroup | None = None

    @property
    def connected(self) -> bool:
        return self._group is not None

    async def connect(self, server: ServerControl, workers: int) -> None:
        await server.end_transfer()
        info = await on_thread(self._listen, workers)
        await together(server.init_transfer(asdict(info)), on_thread(self._meet, info))

    async def send(self, server: ServerControl, snapshot: Snapshot) -> None:
        if self._group is None:
            raise TransferError("the transport is not connected")
        await on_thread(self._send, self._group, snapshot)

    async def close(self) -> None:
        await on_thread(self._let_go)

    def _listen(self, workers: int) -> InitInfo:
        host, timeout_s = self._section.host, self._section.timeout_s
        try:
            # The rendezvous listens on a socket of ours, so that no other process can take the port in between.
            listener = socket.create_server((host, 0))
            info = InitInfo(host, listener.getsockname()[1], workers + 1, self._section.bucket_bytes, timeout_s)
            self._store = dist.TCPStore(
                host,
                info.master_port,
                info.world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise TransferError(
                f"weight_sync.host = {host}: cannot listen there: {error}; name an address of the learner's machine"
            ) from error
        return info

    def _meet(self, info: InitInfo) -> None:
        try:
            self._group = GlooGroup(self._store, 0, info, info.master_address)
        except RuntimeError as error:
            address = f"{info.master_address}:{info.master_port}"
            raise TransferError(f"the server's workers did not come to {address}: {error}") from error

    def _send(self, group: GlooGroup, snapshot: Snapshot) -> None:
        """Returns when every worker has the snapshot staged and its digest agrees."""
        try:
            group.broadcast_in_buckets(snapshot.flat)
            group.broadcast(torch.frombuffer(bytearray(snapshot.digest), dtype=torch.uint8))
            statuses = [group.receive_status(rank) for rank in range(1, group.size)]
        except RuntimeError as error:
            raise TransferError(f"the transfer broke off: {error}") from error
        bad = [rank - 1 for rank, status in enumerate(statuses, 1) if status != OK]
        if bad:
            raise TransferError(f"what workers {bad} received has another digest than what was sent")

    def _let_go(self) -> None:
        self._group = self._store = None  # blocks until gloo's threads have ended
