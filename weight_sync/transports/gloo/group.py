"""A gloo process group of our own, apart from the default one; used by both ends.

Rank 0 is the learner, ranks 1..n are the workers of one server.

Which workers can map each other's memory, so that the bytes travel to one of them.

Found by trying: each worker lays out a few random bytes, and reads those of the others. Containers, users and hosts
that keep processes apart need no rule of their own.

Each pair of ranks proves over gloo itself that both hold the group's secret, before a byte of weights travels (I8).

gloo's own sockets know no authentication: who connects first to a rank's port, with the number that gloo expects there,
is taken for the other rank. So each rank sends each other one a nonce, and answers with an HMAC over both nonces and
both ranks. The rank whose place a stranger took cannot be reached by it any more, so there is nobody to answer for it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from weight_sync.transports.gloo import rendezvous
from weight_sync.transports.gloo.rendezvous import (
    NotProven,
    dist,  # re-exported
    proof,
)
from weight_sync.weights.flat_buffer import Staging, mapped

_OFFER_TAG, _LEADER_TAG = 1_100_001, 1_100_002

# Process id, file descriptor and the bytes laid out, as int64.
_WORDS = 6

_BYTES = 8 * (_WORDS - 2)


def leaders(group: Any, rank: int, size: int, timeout: timedelta) -> list[int]:
    """By rank, the one that receives for it: the lowest worker whose memory it can map, often itself; 0 for 0.

    All ranks of the process group call it at once. Raises RuntimeError where one does not answer in time.
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
    # Who follows one that follows another itself gets its own bytes.
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


# How long a peer may take to answer, at most.
PROOF_S = 15.0

_NONCE_TAG, _PROOF_TAG = 1_000_001, 1_000_002


def prove_peers(group: Any, rank: int, size: int, secret: bytes, timeout_s: float) -> None:
    """Blocks until every other rank of the process group has proved itself. Raises `NotProven`, or RuntimeError where
    one does not answer."""
    peers = [peer for peer in range(size) if peer != rank]
    ours = {peer: secrets.token_bytes(32) for peer in peers}
    theirs = _exchanged(group, rank, ours, _NONCE_TAG, timeout_s)
    answers = {peer: _answer(secret, rank, peer, ours[peer], theirs[peer]) for peer in peers}
    for peer, answer in _exchanged(group, rank, answers, _PROOF_TAG, timeout_s).items():
        if not hmac.compare_digest(answer, _answer(secret, peer, rank, theirs[peer], ours[peer])):
            raise NotProven(f"rank {peer} of the transfer does not hold its secret: a stranger took its place")


def _answer(secret: bytes, sender: int, to: int, senders_nonce: bytes, receivers_nonce: bytes) -> bytes:
    return proof(secret, b"gloo", sender.to_bytes(4), to.to_bytes(4), senders_nonce, receivers_nonce)


def _exchanged(group: Any, rank: int, messages: dict[int, bytes], tag: int, timeout_s: float) -> dict[int, bytes]:
    """What each peer sent, 32 bytes, while `messages` went to them."""
    timeout = timedelta(seconds=min(timeout_s, PROOF_S))
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
