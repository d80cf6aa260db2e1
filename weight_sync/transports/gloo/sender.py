"""The learner's end of the gloo transport: CPU and plain TCP, received by `weight_sync.vllm.plugin`."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch

from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import TransferError
from weight_sync.transports.gloo.group import OK, GlooGroup, dist


class GlooLink:
    """One server's link. See `base.Link`.

    The rendezvous and gloo's own connections know no authentication: whoever reaches `host` while a link is made
    can take a worker's place in it. Let `weight_sync.host` be an address in a network of the run's machines alone.
    """

    def __init__(self, host: str, workers: int, bucket_bytes: int, timeout_s: float) -> None:
        self._host = host
        self._size = workers + 1
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: GlooGroup | None = None
        try:
            # The rendezvous listens on a socket of ours, so that no other process can take the port in between.
            listener = socket.create_server((host, 0))
            self._port = listener.getsockname()[1]
            self._store: Any = dist.TCPStore(
                host,
                self._port,
                self._size,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise TransferError(
                f"weight_sync.host = {host}: cannot listen there: {error}; name an address of the learner's machine"
            ) from error

    def init_info(self) -> dict[str, Any]:
        return {
            "master_address": self._host,
            "master_port": self._port,
            "world_size": self._size,
            "bucket_bytes": self._bucket_bytes,
            "timeout_s": self._timeout_s,
        }

    def connect(self) -> None:
        if self._store is None:
            raise TransferError("the link is closed")
        try:
            self._group = GlooGroup(self._store, 0, self._size, self._host, self._timeout_s)
        except RuntimeError as error:
            raise TransferError(f"the server's workers did not come to {self._host}:{self._port}: {error}") from error

    def update_info(self, snapshot: Snapshot) -> dict[str, Any]:
        return snapshot.manifest.as_dict()

    def send(self, snapshot: Snapshot) -> None:
        group = self._group
        if group is None:
            raise TransferError("the link is not connected")
        try:
            group.broadcast_in_buckets(snapshot.flat, self._bucket_bytes)
            group.broadcast(torch.frombuffer(bytearray(snapshot.digest), dtype=torch.uint8))
            statuses = [group.receive_status(rank) for rank in range(1, self._size)]
        except RuntimeError as error:
            raise TransferError(f"the transfer broke off: {error}") from error
        bad = [rank - 1 for rank, status in enumerate(statuses, 1) if status != OK]
        if bad:
            raise TransferError(f"what workers {bad} received has another digest than what was sent")

    def close(self) -> None:
        self._group = None
        self._store = None
