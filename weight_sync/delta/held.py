"""What a connection brought to its server last, and so what a delta over it may be laid on."""

from __future__ import annotations

import threading

from weight_sync.weights.delta_base import DeltaHistory, DeltaPath
from weight_sync.weights.snapshot import Snapshot


class Held:
    """One connection's: the version that it brought last, by its label and a name of its bytes (`root`).

    That version is proven: the fleet publishes again over a connection only after the proof, and every failure ends it.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._base: tuple[str, str] | None = None
        self._since_full = 0

    def way(self, book: DeltaHistory, snapshot: Snapshot) -> tuple[DeltaPath, str] | None:
        """A delta to `snapshot`, and the root of what it is to be laid on; None where everything is to be sent.

        Blocks, see `Book.way`. Nothing is held any more until `arrived`: what broke off half-way holds nothing.
        """
        base, self._base = self._base, None
        due = self._since_full >= self._full_every
        # Also asked where everything is sent: the book remembers the snapshot for the next delta.
        way = book.way(None if base is None or due else base[0], snapshot)
        return None if way is None or base is None else (way, base[1])

    def arrived(self, snapshot: Snapshot, root: str, by_delta: bool) -> None:
        self._base = (snapshot.label, root)
        self._since_full = self._since_full + 1 if by_delta else 1


class SharedBook:
    """One book for all connections of this process, while there are any. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._book = DeltaHistory()
        self._holders = 0

    def take(self) -> DeltaHistory:
        with self._lock:
            self._holders += 1
            return self._book

    def leave(self) -> None:
        """The last one takes the copy of the weights with it."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._book = DeltaHistory()
