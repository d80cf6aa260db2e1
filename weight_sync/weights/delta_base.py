"""Remembers the newest bytes, the deltas that led there, and the version that each connection brought last."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import torch

from slipstream.weight_sync.weights.delta_codec import Delta, apply, encode_delta
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.snapshot import Snapshot

# Versions that a server may be behind and still get deltas.
STEPS_KEPT = 8


@dataclass(frozen=True)
class DeltaPath:
    """The deltas that lead from one version to another.

    Attributes:
        payloads: uint8 tensors, to be applied in this order.
        share: Share of elements that differ, 0 to 1. Over several steps it is the sum, an upper bound.
    """

    payloads: list[torch.Tensor]
    share: float

    @cached_property
    def joined(self) -> torch.Tensor:
        """All payloads in one uint8 tensor."""
        return self.payloads[0] if len(self.payloads) == 1 else torch.cat(self.payloads)

    @property
    def total_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(payload.numel() for payload in self.payloads)


@dataclass(frozen=True)
class _Step:
    base: str
    label: str
    delta: Delta


class DeltaHistory:
    """The deltas between a learner's snapshots, each computed once for all servers. May be used from any thread.

    It keeps a copy of the newest snapshot that it was asked for, as a snapshot's own buffer is filled again. Steps to
    older snapshots are not kept: a server that needs one gets the whole snapshot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._flat: torch.Tensor | None = None
        self._version, self._label = -1, ""
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)

    def find_path(self, base: str | None, snapshot: Snapshot) -> DeltaPath | None:
        """Return the deltas from the version `base` to `snapshot`; None if unknown, or not smaller than the whole.

        Blocks while it compares, for about as long as a copy of a snapshot takes. `snapshot` is remembered, so that the
        next one can be reached from it.
        """
        with self._lock:
            self._turn_to(snapshot)
            if base is None or snapshot.version != self._version:
                return None
            steps = self._steps_from(base)
        if not steps:
            return None
        path = DeltaPath([step.delta.payload for step in steps], min(1.0, sum(step.delta.share for step in steps)))
        return path if path.total_bytes < snapshot.manifest.total_bytes() else None

    def _turn_to(self, snapshot: Snapshot) -> None:
        if snapshot.version <= self._version and snapshot.manifest == self._manifest:
            return
        if self._flat is None or snapshot.manifest != self._manifest:
            self._manifest, self._flat = snapshot.manifest, snapshot.flat.clone()
            self._steps.clear()
        else:
            delta = encode_delta(self._flat, snapshot.flat, snapshot.manifest)
            apply(delta.payload, self._flat, snapshot.manifest)
            self._steps.append(_Step(self._label, snapshot.label, delta))
        self._version, self._label = snapshot.version, snapshot.label

    def _steps_from(self, base: str) -> list[_Step]:
        steps = list(self._steps)
        for place, step in enumerate(steps):
            if step.base == base:
                return steps[place:]
        return []


class DeltaBase:
    """The version that one connection brought to its server last, from which a delta over it can start.

    That version is proven: the fleet publishes again over a connection only after the proof, and a failure ends it.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._base: tuple[str, str] | None = None
        self._since_full = 0

    def find_path(self, history: DeltaHistory, snapshot: Snapshot) -> tuple[DeltaPath, str] | None:
        """Return the deltas to `snapshot` and the digest of what to apply them to; None to send the whole snapshot.

        Blocks, see `DeltaHistory.find_path`. From now on nothing counts as brought until `arrived` is called, as a
        transfer that breaks off leaves neither version whole.
        """
        base, self._base = self._base, None
        due = self._since_full >= self._full_every
        # Asked even if everything is sent: the history must remember the snapshot for the next delta.
        path = history.find_path(None if base is None or due else base[0], snapshot)
        return None if path is None or base is None else (path, base[1])

    def arrived(self, snapshot: Snapshot, root: str, by_delta: bool) -> None:
        """Note that `snapshot`, whose bytes have the digest `root`, is on the server."""
        self._base = (snapshot.label, root)
        self._since_full = self._since_full + 1 if by_delta else 1
