"""Deadlines by id. No call costs more with the number of ids than the logarithm."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count

import msgspec


class _Time(msgspec.Struct):
    """The time of an id.

    Attributes:
        number: Grows from id to id, in the order of their starts.
        due: When its time is over, unless it is renewed.
        ends: When its time is over, however often it is renewed.
    """

    number: int
    due: float
    ends: float


class Deadlines:
    """Deadlines of tickets, leases or servers, by id.

    A renewal leaves the heap as it is: an entry that comes up before its id is due is put back with the id's own time.

    Args:
        timeout_s: Time from the start or the latest renewal, seconds.
        max_age_s: Time from the start, however often it was renewed, seconds.
    """

    def __init__(self, timeout_s: float, max_age_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._times: dict[str, _Time] = {}
        # Each id has an entry at its deadline or before. Entries of ids that have ended are left until they come up.
        self._heap: list[tuple[float, str]] = []
        self._numbers = count()

    def __iter__(self) -> Iterator[str]:
        """Yield the ids that are out, in the order of their starts."""
        return iter(list(self._times))

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, name: object) -> bool:
        return name in self._times

    def start(self, name: str, now: float) -> None:
        """Start the time of an id; one that was out already starts again."""
        ends = now + self._max_age_s
        known = self._times.get(name)
        if known is None:
            self._times[name] = _Time(next(self._numbers), min(now + self._timeout_s, ends), ends)
            self._push(name)
        else:
            known.ends = ends
            self._move(name, known, now)

    def renew(self, name: str, now: float) -> None:
        """Renew an id, since its holder was heard from. Nothing happens to one that is not out."""
        if (known := self._times.get(name)) is not None:
            self._move(name, known, now)

    def end(self, name: str) -> None:
        """End an id, if it is out."""
        self._times.pop(name, None)

    def has_outlived(self, name: str, now: float) -> bool:
        """Tell whether an id has reached its maximum age. Raises KeyError if it is not out."""
        return self._times[name].ends <= now

    def is_over(self, name: str, now: float) -> bool:
        """Tell whether the time of an id is over. False if it is not out."""
        known = self._times.get(name)
        return known is not None and known.due <= now

    def expired(self, now: float) -> list[str]:
        """Return the ids whose time is over, in the order of their starts."""
        found = set()
        while self.soonest() <= now:
            found.add(heapq.heappop(self._heap)[1])
        for name in found:
            self._push(name)
        return sorted(found, key=lambda name: self._times[name].number)

    def soonest(self) -> float:
        """Return the first deadline; infinity if nothing is out."""
        while self._heap:
            at, name = self._heap[0]
            known = self._times.get(name)
            if known is None:
                heapq.heappop(self._heap)
            elif known.due > at:
                heapq.heapreplace(self._heap, (known.due, name))
            else:
                return at
        return math.inf

    def _move(self, name: str, known: _Time, now: float) -> None:
        before, known.due = known.due, min(now + self._timeout_s, known.ends)
        if known.due < before:
            self._push(name)

    def _push(self, name: str) -> None:
        heapq.heappush(self._heap, (self._times[name].due, name))
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(known.due, name) for name, known in self._times.items()]
            heapq.heapify(self._heap)
