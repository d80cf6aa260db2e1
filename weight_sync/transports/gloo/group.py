"""A gloo process group of our own, apart from the default one; used by both ends.

Rank 0 is the learner, ranks 1..n are the workers of one server.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

# torch's annotations leave out stores and process groups.
dist: Any = torch.distributed

OK = 1
BAD_DIGEST = 2


class GlooGroup:
    """Broadcast from the learner and a status back, each bounded by the group's time-out.

    Every call raises RuntimeError when the peer is gone or late; the group is then of no more use.
    """

    def __init__(self, store: Any, rank: int, size: int, local_host: str, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 2
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """`tensor` of rank 0 into `tensor` of all others, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait(self._timeout)

    def broadcast_in_buckets(self, flat: torch.Tensor, bucket_bytes: int) -> None:
        for start in range(0, len(flat), bucket_bytes):
            self.broadcast(flat[start : start + bucket_bytes])

    def send_status(self, status: int) -> None:
        self._group.send([torch.tensor([status])], 0, self.rank).wait(self._timeout)

    def receive_status(self, rank: int) -> int:
        status = torch.zeros(1, dtype=torch.int64)
        self._group.recv([status], rank, rank).wait(self._timeout)
        return int(status)


def local_host_towards(host: str) -> str:
    """This machine's address as `host` sees it, so that gloo binds the right interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
