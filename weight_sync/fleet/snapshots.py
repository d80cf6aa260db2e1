"""The snapshots that are alive: at most three, so that servers which are behind cost no more memory, and no wait.

Two at most are on their way to servers; the newest waits for those that come; one is filled. The learner's thread
fills, the loop's thread takes and gives back. Where two are on their way and no server has taken the newest, that one
is overtaken: it makes room for the next. So the learner waits for the copy alone, and servers for one another: one that
is done waits for those that still hold the older of two versions, and they have to let go of it when it has waited
long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch

from weight_sync.weights.snapshot import Probe, Snapshot

MAX_ON_THEIR_WAY = 2


class Snapshots:
    """`freed` is called when a server that found no room may ask again."""

    def __init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._newest: Snapshot | None = None
        self._holders: dict[int, set[str]] = {}
        self._held: dict[int, Snapshot] = {}
        self._free: list[torch.Tensor] = []
        # Versions whose buffer a thread may still read, after a transfer that was cut off.
        self._read: set[int] = set()
        self._blocked_at: float | None = None

    @property
    def newest(self) -> Snapshot | None:
        return self._newest

    @property
    def alive(self) -> int:
        """Snapshots with a buffer, without the one that is being filled."""
        with self._lock:
            return len(self._held) + self._waits()

    def fill(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
        dtype: torch.dtype | None,
        run_id: str = "",
    ) -> Snapshot:
        """Copy the weights; the result is the newest from now on."""
        with self._lock:
            if len(self._held) >= MAX_ON_THEIR_WAY and self._newest is not None and self._waits():
                self._keep(self._newest)
                self._newest = None
            buffer = self._free.pop() if self._free else None
        snapshot = Snapshot(version, weights, probe, dtype, buffer, run_id)
        with self._lock:
            before, self._newest = self._newest, snapshot
            if before is not None and before.version not in self._held:
                self._keep(before)
        return snapshot

    def take(self, name: str) -> Snapshot | None:
        """The newest, held by server `name` until it is given back. None while two older ones are on their way."""
        with self._lock:
            snapshot = self._newest
            if snapshot is None:
                return None
            if snapshot.version not in self._held and len(self._held) >= MAX_ON_THEIR_WAY:
                self._blocked_at = time.monotonic() if self._blocked_at is None else self._blocked_at
                return None
            self._held[snapshot.version] = snapshot
            self._holders.setdefault(snapshot.version, set()).add(name)
            return snapshot

    def give_back(self, name: str, snapshot: Snapshot, whole: bool) -> None:
        """`whole`: the publication came to its end, so that no thread can still read the buffer: it is used again."""
        with self._lock:
            names = self._holders.get(snapshot.version)
            if names is None or name not in names:
                return
            names.discard(name)
            if not whole:
                self._read.add(snapshot.version)
            if names:
                return
            self._drop(snapshot.version)
        self.freed()

    def held_up(self, seconds: float) -> list[str]:
        """The servers that hold the oldest version, if another has waited so long for the room that it takes."""
        with self._lock:
            if self._blocked_at is None or time.monotonic() - self._blocked_at < seconds:
                return []
            return sorted(self._holders[min(self._holders)])

    def forget_oldest(self) -> int:
        """Count the oldest version no more, though a server that does not answer still holds it; its buffer is never
        filled again. Returns the version."""
        with self._lock:
            oldest = min(self._held)
            self._read.add(oldest)
            self._drop(oldest)
        self.freed()
        return oldest

    def _drop(self, version: int) -> None:
        snapshot = self._held.pop(version)
        del self._holders[version]
        self._blocked_at = None
        if snapshot is not self._newest:
            self._keep(snapshot)

    def _waits(self) -> bool:
        """Whether the newest is on its way to no server."""
        return self._newest is not None and self._newest.version not in self._held

    def _keep(self, snapshot: Snapshot) -> None:
        """Its buffer is to be filled again, unless it may still be read."""
        if snapshot.version in self._read:
            self._read.discard(snapshot.version)
        elif len(self._free) < MAX_ON_THEIR_WAY:
            self._free.append(snapshot.flat)
