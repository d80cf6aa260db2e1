"""Keeps at most three snapshots, so that slow servers cost neither more memory nor a wait of the learner.

At most two are being published and one is filled or waits to be taken. The learner's thread fills; the publisher's
thread takes and gives back. If two are being published and no server has taken the newest, the next one replaces it. So
the learner waits for the copy only. A server that is done may have to wait for others that still publish the older of
two versions; after a while the fleet ends these publications.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch

from slipstream.weight_sync.weights.snapshot import Probe, Snapshot

MAX_ON_THEIR_WAY = 2


class Snapshots:
    """The snapshots of one learner.

    Attributes:
        freed: Called when a server that found no room may ask again.
    """

    def __init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._newest: Snapshot | None = None
        self._holders: dict[int, set[str]] = {}
        self._held: dict[int, Snapshot] = {}
        self._free: list[torch.Tensor] = []
        # Versions whose buffer a thread may still read after a transfer that was cut off.
        self._read: set[int] = set()
        self._blocked_at: float | None = None

    @property
    def newest(self) -> Snapshot | None:
        return self._newest

    @property
    def alive(self) -> int:
        """Number of snapshots with a buffer, without the one that is being filled."""
        with self._lock:
            return len(self._held) + self._waits()

    def make_room(self) -> list[int]:
        """Drop the newest snapshot if no server has taken it and there is no room for another.

        Returns:
            The versions that may still be sent.
        """
        with self._lock:
            if len(self._held) >= MAX_ON_THEIR_WAY and self._newest is not None and self._waits():
                self._keep(self._newest)
                self._newest = None
            return sorted({*self._held, *([self._newest.version] if self._newest is not None else [])})

    def fill(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
        dtype: torch.dtype | None,
        run_id: str = "",
    ) -> Snapshot:
        """Copy the weights into a snapshot, which is the newest from now on.

        Args:
            weights: Names and tensors as in a checkpoint, on any device.
            probe: Proves the version.
            dtype: Type in which floating-point tensors are sent; None: their own.
            run_id: Id of the run whose version it is.
        """
        self.make_room()
        with self._lock:
            buffer = self._free.pop() if self._free else None
        snapshot = Snapshot(version, weights, probe, dtype, buffer, run_id)
        with self._lock:
            before, self._newest = self._newest, snapshot
            if before is not None and before.version not in self._held:
                self._keep(before)
        return snapshot

    def take(self, name: str) -> Snapshot | None:
        """Return the newest snapshot, which server `name` holds until it gives it back; None while two older ones are
        held."""
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
        """End the hold of server `name`.

        Args:
            whole: Whether the publication came to its end, so that no thread can still read the buffer.
        """
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
        """Return the servers that hold the oldest version, if another one has waited `seconds` for its room."""
        with self._lock:
            if self._blocked_at is None or time.monotonic() - self._blocked_at < seconds:
                return []
            return sorted(self._holders[min(self._holders)])

    def forget_oldest(self) -> int:
        """Drop the oldest version, which a server that does not answer still holds. Its buffer is never filled again.

        Returns:
            The version.
        """
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
        """Return whether no server has taken the newest snapshot."""
        return self._newest is not None and self._newest.version not in self._held

    def _keep(self, snapshot: Snapshot) -> None:
        """Keep the buffer for another snapshot, unless a thread may still read it."""
        if snapshot.version in self._read:
            self._read.discard(snapshot.version)
        elif len(self._free) < MAX_ON_THEIR_WAY:
            self._free.append(snapshot.flat)
