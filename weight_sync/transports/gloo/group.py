"""A gloo process group of our own, apart from the default one; used by both ends.

Rank 0 is the learner, ranks 1..n are the workers of one server.
"""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from weight_sync.transports.gloo import rendezvous
from weight_sync.transports.gloo.peers import prove_peers
from weight_sync.transports.gloo.rendezvous import dist as dist  # re-exported

OK = 1
BAD_DIGEST = 2


@dataclass(frozen=True)
class InitInfo:
    """Body of `/init_weight_transfer_engine`: where the learner listens, and how it sends.

    world_size: the learner and all workers. bucket_bytes: bytes of one broadcast. timeout_s: bounds every wait. secret:
    of this group alone, random, in hex digits; this body travels over a route that wants the learner's token.
    """

    master_address: str
    master_port: int
    world_size: int
    bucket_bytes: int
    timeout_s: float
    secret: str = field(repr=False)

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.secret)


class GlooGroup:
    """Broadcast from the learner and a status back, each bounded by the group's time-out.

    Every call raises RuntimeError when the peer is gone or late; the group is of no use after that.
    """

    def __init__(self, store: Any, rank: int, info: InitInfo, local_host: str) -> None:
        """Blocks until all `info.world_size` ranks have come to `store`, and each has proved to each other that it
        holds the group's secret. `local_host`: this end's own address."""
        self._timeout = timedelta(seconds=info.timeout_s)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
        options._timeout = self._timeout
        options._threads = 2
        self.rank = rank
        self.size = info.world_size
        self._bucket_bytes = info.bucket_bytes
        self._group = dist.ProcessGroupGloo(store, rank, self.size, options)
        prove_peers(self._group, rank, self.size, info.key, info.timeout_s)

    @classmethod
    def join(cls, info: InitInfo, rank: int) -> GlooGroup:
        """A worker's place in the group of the learner that `info` names; blocks until all are there."""
        store, line = rendezvous.come(info.master_address, info.master_port, info.key, rank, info.timeout_s)
        with closing(line):
            return cls(store, rank, info, local_host_towards(info.master_address))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """`tensor` of rank 0 into `tensor` of all others, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait(self._timeout)

    def broadcast_in_buckets(self, flat: torch.Tensor) -> None:
        """As `broadcast`, for a uint8 tensor of any size."""
        for start in range(0, len(flat), self._bucket_bytes):
            self.broadcast(flat[start : start + self._bucket_bytes])

    def send_status(self, status: int) -> None:
        """Tell the learner `OK` or `BAD_DIGEST`."""
        self._group.send([torch.tensor([status])], 0, self.rank).wait(self._timeout)

    def receive_status(self, rank: int) -> int:
        """What worker `rank` says of the snapshot that it received."""
        status = torch.zeros(1, dtype=torch.int64)
        self._group.recv([status], rank, rank).wait(self._timeout)
        return int(status)


def local_host_towards(host: str) -> str:
    """This machine's address as `host` sees it, so that gloo binds the right interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
