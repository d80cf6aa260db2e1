"""Which workers can map each other's memory, so that the bytes travel to one of them.

Found by trying: each worker lays out a few random bytes, and reads those of the others. Containers, users and hosts
that keep processes apart need no rule of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

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
