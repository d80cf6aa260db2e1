"""A gloo process group apart from torch's default one. Rank 0 is the learner, ranks 1..n are a server's workers.

When it is made, each pair of ranks authenticates over gloo itself, before a byte of weights travels (I8): gloo's
sockets take whoever connects first for the expected rank. Each rank sends every other one a nonce and answers with an
HMAC over both nonces and both ranks. A rank whose place a stranger took cannot be reached by that stranger, so nobody
can answer for it.

Then workers find out by trying whose memory they can map, so that the bytes travel to one of them only. This needs no
rule for containers, users and hosts.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from slipstream.weight_sync.transports.base import local_host_towards
from slipstream.weight_sync.transports.gloo import rendezvous
from slipstream.weight_sync.transports.gloo.rendezvous import (
    AuthenticationError,
    dist,  # re-exported
    mac_of,
)
from slipstream.weight_sync.weights.host_memory import Staging, mapped

_OFFER_TAG, _LEADER_TAG = 1_100_001, 1_100_002

# Process id, file descriptor and the bytes laid out, as int64.
_WORDS = 6
_BYTES = 8 * (_WORDS - 2)

# Maximum seconds for a peer's answer.
AUTHENTICATION_S = 15.0
_NONCE_TAG, _ANSWER_TAG = 1_000_001, 1_000_002

# Statuses that a worker sends after the bytes.
OK = 1
BAD_DIGEST = 2
NOT_MAPPED = 3

# Number of buckets that travel while one is hashed.
AHEAD = 2
_BUCKET_TAG = 2_000_000


def leaders(group: Any, rank: int, size: int, timeout: timedelta) -> list[int]:
    """Find for each rank the one that receives for it. All ranks of the process group call it at once.

    Returns:
        By rank: the lowest worker whose memory the rank can map, often itself; 0 for the learner.

    Raises:
        RuntimeError: A rank does not answer in time.
    """
    if size <= 2:
        return list(range(size))
    if rank == 0:
        return _told_by_learner(group, size, timeout)
    probe = Staging(shared=True)
    flat = probe.take(_BYTES)
    flat.copy_(torch.frombuffer(bytearray(secrets.token_bytes(_BYTES)), dtype=torch.uint8))
    offer = torch.cat([torch.tensor(probe.place), flat.view(torch.int64)])
    group.send([offer], 0, _OFFER_TAG).wait(timeout)
    offers = torch.zeros(size, _WORDS, dtype=torch.int64)
    group.recv([offers], 0, _OFFER_TAG).wait(timeout)
    found = next((lower for lower in range(1, rank) if _readable(offers[lower])), rank)
    group.send([torch.tensor([found])], 0, _LEADER_TAG).wait(timeout)
    agreed = torch.zeros(size, dtype=torch.int64)
    group.recv([agreed], 0, _LEADER_TAG).wait(timeout)
    probe.forget()
    return [int(leader) for leader in agreed]


def _told_by_learner(group: Any, size: int, timeout: timedelta) -> list[int]:
    offers = torch.zeros(size, _WORDS, dtype=torch.int64)
    _each(size, lambda rank: group.recv([offers[rank]], rank, _OFFER_TAG), timeout)
    _each(size, lambda rank: group.send([offers], rank, _OFFER_TAG), timeout)
    found = torch.zeros(size, dtype=torch.int64)
    _each(size, lambda rank: group.recv([found[rank : rank + 1]], rank, _LEADER_TAG), timeout)
    # A worker whose leader follows another one receives its own bytes.
    agreed = torch.where(found[found] == found, found, torch.arange(size))
    _each(size, lambda rank: group.send([agreed], rank, _LEADER_TAG), timeout)
    return [int(leader) for leader in agreed]


def _each(size: int, work: Callable[[int], Any], timeout: timedelta) -> None:
    for under_way in [work(rank) for rank in range(1, size)]:
        under_way.wait(timeout)


def _readable(offer: torch.Tensor) -> bool:
    pid, fd = int(offer[0]), int(offer[1])
    try:
        return torch.equal(mapped(pid, fd, _BYTES).view(torch.int64), offer[2:])
    except OSError:
        return False


def authenticate_peers(group: Any, rank: int, size: int, secret: bytes, timeout_s: float) -> None:
    """Block until every other rank of the process group has shown that it holds the group's secret.

    Raises:
        AuthenticationError: A rank does not hold it.
        RuntimeError: A rank does not answer.
    """
    peers = [peer for peer in range(size) if peer != rank]
    ours = {peer: secrets.token_bytes(32) for peer in peers}
    theirs = _exchanged(group, rank, ours, _NONCE_TAG, timeout_s)
    answers = {peer: _answer(secret, rank, peer, ours[peer], theirs[peer]) for peer in peers}
    for peer, answer in _exchanged(group, rank, answers, _ANSWER_TAG, timeout_s).items():
        if not hmac.compare_digest(answer, _answer(secret, peer, rank, theirs[peer], ours[peer])):
            raise AuthenticationError(
                f"rank {peer} of the transfer does not hold its secret: a stranger took its place"
            )


def _answer(secret: bytes, sender: int, to: int, senders_nonce: bytes, receivers_nonce: bytes) -> bytes:
    return mac_of(secret, b"gloo", sender.to_bytes(4), to.to_bytes(4), senders_nonce, receivers_nonce)


def _exchanged(group: Any, rank: int, messages: dict[int, bytes], tag: int, timeout_s: float) -> dict[int, bytes]:
    """Send `messages` to the peers, and return what each of them sent: 32 bytes."""
    timeout = timedelta(seconds=min(timeout_s, AUTHENTICATION_S))
    out = {peer: torch.frombuffer(bytearray(message), dtype=torch.uint8) for peer, message in messages.items()}
    into = {peer: torch.zeros(32, dtype=torch.uint8) for peer in messages}
    sent = [group.send([tensor], peer, tag) for peer, tensor in out.items()]
    received = {peer: group.recv([tensor], peer, tag) for peer, tensor in into.items()}
    for peer, work in received.items():
        try:
            work.wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(f"rank {peer} of the transfer did not prove itself: {error}") from error
    for work in sent:
        work.wait(timeout)
    return {peer: tensor.numpy().tobytes() for peer, tensor in into.items()}


@dataclass(frozen=True)
class GlooInitInfo:
    """Body of `/init_weight_transfer_engine`: where the learner listens, and how it sends.

    Attributes:
        world_size: Number of ranks: the learner and all workers.
        bucket_bytes: Bytes of one broadcast.
        timeout_s: Bound on every wait, in seconds.
        secret: Random, of this group only, in hex. This body travels over a route that wants the learner's token.
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
    """Moves bytes from the learner to its workers and a status back. Each wait is bounded by the group's time-out.

    Every call raises RuntimeError if the peer is gone or late. The group cannot be used after that.
    """

    def __init__(self, store: Any, rank: int, info: GlooInitInfo, local_host: str) -> None:
        """Block until all `info.world_size` ranks have come to `store` and authenticated each other.

        Args:
            local_host: This end's own address.
        """
        self._timeout = timedelta(seconds=info.timeout_s)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
        options._timeout = self._timeout
        options._threads = 2
        self.rank = rank
        self.size = info.world_size
        self._bucket_bytes = info.bucket_bytes
        self._group = dist.ProcessGroupGloo(store, rank, self.size, options)
        authenticate_peers(self._group, rank, self.size, info.key, info.timeout_s)
        self._leaders = leaders(self._group, rank, self.size, self._timeout)

    @classmethod
    def join(cls, info: GlooInitInfo, rank: int) -> GlooGroup:
        """Join the group of the learner that `info` names, as a worker. Blocks until all ranks have come."""
        store, channel = rendezvous.join(info.master_address, info.master_port, info.key, rank, info.timeout_s)
        with closing(channel):
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
        """Send `flat` (uint8) from the learner to all `receivers`, in place. Each of them iterates over it to the end.

        Yields:
            Each bucket once it has travelled. The next `AHEAD` travel while the caller works on it.
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
        """Send a few numbers to another rank."""
        self._group.send([torch.tensor(words)], rank, self.rank).wait(self._timeout)

    def hear(self, rank: int, count: int = 1) -> list[int]:
        """Receive `count` numbers from `rank`."""
        words = torch.zeros(count, dtype=torch.int64)
        self._group.recv([words], rank, rank).wait(self._timeout)
        return [int(word) for word in words]

    def _through(self, bucket: torch.Tensor, works: list[Any]) -> torch.Tensor:
        for work in works:
            work.wait(self._timeout)
        return bucket
