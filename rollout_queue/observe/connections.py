"""Counts of the queue's connections, and of the requests that it had no room for."""

from __future__ import annotations

from collections import Counter

from slipstream.protocol.status import ConnectionStatus

_KEPT_S = 3600.0


class ConnectionCounts:
    """Counts open connections by kind, and the requests of workers that were refused (BUSY).

    Args:
        max_workers: How many workers the queue takes.

    Attributes:
        open: Open connections by kind.
        limits: How many there may be.
    """

    def __init__(self, max_workers: int) -> None:
        self.open: Counter[str] = Counter()
        self.limits: dict[str, int] = {}
        self._max_workers = max_workers
        self._refused = self._refused_ever = 0
        self._first_at = self._newest_at = 0.0

    def refuse(self, now: float) -> None:
        """Count a refusal. The count begins again after an hour without one."""
        if not self._refused or now - self._newest_at > _KEPT_S:
            self._refused, self._first_at = 0, now
        self._refused += 1
        self._refused_ever += 1
        self._newest_at = now

    def status(self, now: float) -> ConnectionStatus:
        found = ConnectionStatus(
            open={kind: self.open[kind] for kind in sorted({*self.open, *self.limits})},
            limits=dict(self.limits),
            max_workers=self._max_workers,
            refused_ever=self._refused_ever,
        )
        if self._refused and now - self._newest_at <= _KEPT_S:
            found.refused = self._refused
            found.refused_since_s, found.refused_s_ago = now - self._first_at, now - self._newest_at
        return found
