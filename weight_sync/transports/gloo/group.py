"""A gloo process group of our own, apart from the default one; used by both ends.

Rank 0 is the learner, ranks 1..n are the workers of one server.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from weight_sync.transports.gloo import rendezvous
from weight_sync.transports.gloo.hosts import leaders
from weight_sync.transports.gloo.peers import prove_peers
from weight_sync.transports.gloo.rendezvous import dist  # re-exported

# What a worker says of the bytes.
OK = 1

BAD_DIGEST = 2

NOT_MAPPED = 3

# Buckets that travel while one is hashed.
AHEAD = 2

_BUCKET_TAG = 2_000_000


@dataclass(frozen=True)
class GlooInitInfo:
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
    """Bytes from the learner to its workers and a status back, each wait bounded by the group's time-out.

    Every call raises RuntimeError when the peer is gone or late; the group is of no use after that.
    """

    def __init__(self, store: Any, rank: int, info: GlooInitInfo, local_host: str) -> None:
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
        self._leaders = leaders(self._group, rank, self.size, self._timeout)

    @classmethod
    def join(cls, info: GlooInitInfo, rank: int) -> GlooGroup:
        """A worker's place in the group of the learner that `info` names; blocks until all are there."""
        store, line = rendezvous.come(info.master_address, info.master_port, info.key, rank, info.timeout_s)
        with closing(line):
            return cls(store, rank, info, local_host_towards(info.master_address))

    @property
    def receivers(self) -> list[int]:
        """The workers to which bytes are sent; the others map their memory."""
        return sorted(set(self._leaders[1:]))

    @property
    def followers(self) -> list[int]:
        """The workers that map this one's memory."""
        return [rank for rank, leader in enumerate(self._leaders) if leader == self.rank != rank]

    @property
    def leader(self) -> int:
        """The worker that receives for this one; itself, if it receives."""
        return self._leaders[self.rank]

    def buckets(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """`flat`, uint8, from the learner to all `receivers`, in place: called by each of them, and gone through.

        Yields each bucket when it is through; the next `AHEAD` travel beside whatever the caller does with it.
        """
        move = self._group.send if self.rank == 0 else self._group.recv
        peers = self.receivers if self.rank == 0 else [0]
        under_way: deque[tuple[torch.Tensor, list[Any]]] = deque()
        for number, bucket in enumerate(torch.split(flat, self._bucket_bytes) if len(flat) else ()):
            under_way.append((bucket, [move([bucket], peer, _BUCKET_TAG + number) for peer in peers]))
            if len(under_way) > AHEAD:
                yield self._through(*under_way.popleft())
        while under_way:
            yield self._through(*under_way.popleft())

    def tell(self, rank: int, *words: int) -> None:
        """A few numbers to another rank."""
        self._group.send([torch.tensor(words)], rank, self.rank).wait(self._timeout)

    def hear(self, rank: int, count: int = 1) -> list[int]:
        """What `rank` tells this one: `count` numbers."""
        words = torch.zeros(count, dtype=torch.int64)
        self._group.recv([words], rank, rank).wait(self._timeout)
        return [int(word) for word in words]

    def _through(self, bucket: torch.Tensor, works: list[Any]) -> torch.Tensor:
        for work in works:
            work.wait(self._timeout)
        return bucket


def local_host_towards(host: str) -> str:
    """This machine's address as `host` sees it, so that gloo binds the right interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
