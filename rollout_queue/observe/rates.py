"""Events per second over the last minute, and waits with their beginning. Times are arguments, in seconds."""

from __future__ import annotations

import math
from collections import Counter, deque

import msgspec

from protocol.status import Rates, Wait

WINDOW_S = 60.0


class RateMeter:
    """Counts events in one-second buckets, so that its memory does not grow with the rate."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._buckets: deque[tuple[int, Counter[str]]] = deque()

    def add(self, now: float, **events: int) -> None:
        second = int(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, Counter()))
        self._buckets[-1][1].update(events)
        self._forget(now)

    def rates(self, now: float) -> Rates:
        self._forget(now)
        total: Counter[str] = Counter()
        for _, counts in self._buckets:
            total.update(counts)
        span = max(1.0, min(WINDOW_S, now - self._started))
        return Rates(**{name: total[name] / span for name in Rates.__struct_fields__})

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - WINDOW_S:
            self._buckets.popleft()


class Waits:
    """Who waits for what. A wait that goes on over several requests keeps its beginning."""

    def __init__(self) -> None:
        self._waits: dict[str, _Entry] = {}

    def begin(self, who: str, what: str, now: float, until: float = math.inf) -> None:
        """Note a wait, or that it goes on. It is forgotten after `until` if not renewed: its owner has gone."""
        entry = self._waits.get(who)
        since = entry.since if entry is not None and entry.until >= now else now
        self._waits[who] = _Entry(what, since, until)

    def end(self, who: str) -> None:
        self._waits.pop(who, None)

    def what(self, who: str) -> str | None:
        entry = self._waits.get(who)
        return entry.what if entry is not None else None

    def list(self, now: float) -> list[Wait]:
        self._waits = {who: entry for who, entry in self._waits.items() if entry.until >= now}
        return [Wait(who, entry.what, now - entry.since) for who, entry in self._waits.items()]


class _Entry(msgspec.Struct, frozen=True):
    what: str
    since: float
    until: float
