"""What the learner remembers so that it can say how a server's weights differ from the newest: one copy of the newest
bytes, and the steps that led there.

What a connection brought to its server last, and so what a delta over it may be laid on.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import torch

from weight_sync.weights.delta_codec import Delta, apply, encode_delta
from weight_sync.weights.flat_buffer import Manifest
from weight_sync.weights.snapshot import Snapshot

# Versions that a server may lie behind and still be helped by deltas.
STEPS_KEPT = 8


@dataclass(frozen=True)
class DeltaPath:
    """How to get from one version to another: payloads (uint8) to lay on in their order.

    share: elements that differ, 0 to 1; over several steps the sum, which is at least what differs in the end.
    """

    payloads: list[torch.Tensor]
    share: float

    @cached_property
    def joined(self) -> torch.Tensor:
        """The payloads one behind the other."""
        return self.payloads[0] if len(self.payloads) == 1 else torch.cat(self.payloads)

    @property
    def total_bytes(self) -> int:
        return sum(payload.numel() for payload in self.payloads)


@dataclass(frozen=True)
class _Step:
    base: str
    label: str
    delta: Delta


class DeltaHistory:
    """Deltas between the snapshots of one learner, each worked out once for all servers. May be used from any thread.

    It holds a copy of the newest snapshot that it was asked for, since a snapshot's own buffer is filled again. A step
    to an older snapshot is not kept: that server gets everything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._flat: torch.Tensor | None = None
        self._version = -1
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)

    def way(self, base: str | None, snapshot: Snapshot) -> DeltaPath | None:
        """From the version labelled `base` to `snapshot`; None where it is not known or not smaller than everything.

        Blocks while it compares, for about as long as it takes to copy a snapshot. `snapshot` is remembered, so that
        the next one can be reached from it.
        """
        with self._lock:
            self._turn_to(snapshot)
            if base is None or snapshot.version != self._version:
                return None
            steps = self._steps_from(base)
        if not steps:
            return None
        way = DeltaPath([step.delta.payload for step in steps], min(1.0, sum(step.delta.share for step in steps)))
        return way if way.total_bytes < snapshot.manifest.total_bytes() else None

    def _turn_to(self, snapshot: Snapshot) -> None:
        if snapshot.version <= self._version and snapshot.manifest == self._manifest:
            return
        if self._flat is None or snapshot.manifest != self._manifest:
            self._manifest, self._flat = snapshot.manifest, snapshot.flat.clone()
            self._steps.clear()
        else:
            delta = encode_delta(self._flat, snapshot.flat, snapshot.manifest)
            apply(delta.payload, self._flat, snapshot.manifest)
            self._steps.append(_Step(str(self._version), snapshot.label, delta))
        self._version = snapshot.version

    def _steps_from(self, base: str) -> list[_Step]:
        steps = list(self._steps)
        for place, step in enumerate(steps):
            if step.base == base:
                return steps[place:]
        return []


class DeltaBase:
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
