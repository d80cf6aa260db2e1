"""Shares the queue's connections out by kind, so that a fleet of workers leaves the learner and operators theirs.

The share of each kind follows from `queue.max_workers`. A connection that waits for its client - it is idle, or its
request's head is not complete - gives its place up to the next one of its kind, so that only requests that are being
answered can use a share up.
"""

from __future__ import annotations

import contextlib
import resource
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol
from urllib.parse import unquote_to_bytes

import msgspec

from slipstream.protocol import access
from slipstream.rollout_queue.observe.connections import ConnectionCounts

# A worker's long-poll for tickets, its heartbeat, and groups that it submits.
PER_WORKER = 4

# A fleet that starts at once connects at once: each worker's first poll and heartbeat.
_NEW_PER_WORKER = 2

_NEW = 64

_CONTROL = 256

_CLOSING = 256

_HEALTH = 32

# Store, log, listener, threads' pipes.
_FILES = 64

# File descriptors without which no queue starts: enough for 10 workers.
MIN_DESCRIPTORS = 256


class Kind(StrEnum):
    """The kind of client that a connection serves.

    NEW: its first request's head is not complete. WORKER: it asked for a route of workers. CONTROL: learner, server
    servers, people and monitors. HEALTH: the liveness probe. CLOSING: it was answered, and is not closed yet.
    """

    NEW = "new"
    WORKER = "worker"
    CONTROL = "control"
    HEALTH = "health"
    CLOSING = "closing"


_WORKER_ROUTES = (access.DRAW_TICKETS, access.FAIL_TICKET, access.HEARTBEAT, access.SIGN_OFF, access.SUBMIT_GROUP)

_WORKER_PATHS = tuple({route.path.partition("{")[0].encode() for route in _WORKER_ROUTES})


def kind_of(target: bytes) -> Kind:
    """Return the kind of a connection by its request's target: a path, maybe with a query, encoded or a whole URL."""
    path = target.partition(b"?")[0]
    if not path.startswith(b"/"):
        path = path.partition(b"://")[2]
        path = path[path.find(b"/") :]
    if b"%" in path:
        path = unquote_to_bytes(path)
    if path.startswith(_WORKER_PATHS):
        return Kind.WORKER
    return Kind.HEALTH if path == access.HEALTH.encode() else Kind.CONTROL


class Shares(msgspec.Struct, frozen=True):
    """How many connections of each kind there may be, for `max_workers`, and file descriptors for other uses."""

    max_workers: int
    new: int = _NEW
    control: int = _CONTROL
    closing: int = _CLOSING
    health: int = _HEALTH
    files: int = _FILES

    @property
    def limits(self) -> Mapping[Kind, int]:
        return {
            Kind.NEW: _NEW_PER_WORKER * self.max_workers + self.new,
            Kind.WORKER: PER_WORKER * self.max_workers,
            Kind.CONTROL: self.control,
            Kind.HEALTH: self.health,
            Kind.CLOSING: self.closing,
        }

    @property
    def descriptors(self) -> int:
        """File descriptors that the process needs."""
        return sum(self.limits.values()) + self.files


def fit(max_workers: int, descriptors: int) -> Shares:
    """Return the shares for `max_workers`, or for as many as a process with so many file descriptors can serve.

    Args:
        descriptors: At least `MIN_DESCRIPTORS`.
    """
    wanted = Shares(max_workers)
    if wanted.descriptors <= descriptors:
        return wanted
    # With few descriptors the other shares are small, too.
    eighth = descriptors // 8
    least = Shares(
        0,
        new=min(_NEW, eighth),
        control=min(_CONTROL, eighth),
        closing=min(_CLOSING, eighth),
        health=min(_HEALTH, eighth),
        files=min(_FILES, 2 * eighth),
    )
    left = descriptors - least.descriptors
    return msgspec.structs.replace(least, max_workers=min(max_workers, left // (PER_WORKER + _NEW_PER_WORKER)))


def raise_descriptors() -> int:
    """Raise this process's limit of file descriptors to the hard limit. Returns it."""
    with contextlib.suppress(ValueError, OSError):  # a kernel may allow fewer than the hard limit says
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if files == resource.RLIM_INFINITY else files


class Pooled(Protocol):
    """A connection in the pool."""

    def drop(self) -> None:
        """Close it at once, since another needs its place."""


class ConnectionPool:
    """Holds the open connections of one queue, and finds or refuses a place for each.

    Args:
        shares: How many there may be of each kind.
        counts: Counts them for the status.
        now: The queue's clock, seconds.
    """

    def __init__(self, shares: Shares, counts: ConnectionCounts, now: Callable[[], float]) -> None:
        self.max_workers = shares.max_workers
        self._limits = shares.limits
        self._counts = counts
        self._now = now
        self._kinds: dict[Pooled, Kind] = {}
        # Oldest first.
        self._waiting: dict[Kind, OrderedDict[Pooled, None]] = {kind: OrderedDict() for kind in Kind}
        counts.limits = {str(kind): limit for kind, limit in self._limits.items()}

    def enter(self, connection: Pooled, kind: Kind) -> bool:
        """Give a connection a place among those of `kind`, and take it from the one it had.

        Returns:
            False if there is none: the requests of all the others are being answered. It then keeps the place it had.
        """
        before = self._kinds.get(connection)
        if before is kind:
            return True
        if self._counts.open[kind] >= self._limits[kind]:
            oldest = next(iter(self._waiting[kind]), None)
            if oldest is not None:
                self.leave(oldest)
                oldest.drop()
            elif kind is not Kind.HEALTH:  # answered at once, so there are never many
                if kind is Kind.WORKER:
                    self._counts.refuse(self._now())
                return False
        if before is not None:
            self.leave(connection)
        self._kinds[connection] = kind
        self._counts.open[kind] += 1
        return True

    def leave(self, connection: Pooled) -> None:
        """Forget a connection. Does nothing if it is not here."""
        if (kind := self._kinds.pop(connection, None)) is not None:
            self._counts.open[kind] -= 1
            self._waiting[kind].pop(connection, None)

    def waits(self, connection: Pooled) -> None:
        """Note that a connection waits for its client, and may be closed if another needs its place."""
        if (kind := self._kinds.get(connection)) is not None:
            self._waiting[kind][connection] = None
            self._waiting[kind].move_to_end(connection)

    def works(self, connection: Pooled) -> None:
        """Note that a connection's request is being answered."""
        if (kind := self._kinds.get(connection)) is not None:
            self._waiting[kind].pop(connection, None)
