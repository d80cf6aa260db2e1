"""How many episodes a worker may run, and how much of that was idle because there were no tickets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Capacity:
    """Permits for `total` episodes, taken a group at a time. `clock`: seconds, monotonic."""

    def __init__(self, total: int, clock: Callable[[], float]) -> None:
        self.total = total
        self.free = total
        self._clock = clock
        self._changed = asyncio.Event()
        self._asking = False
        self._idle_s = 0.0
        self._noted_at = clock()

    @property
    def in_flight(self) -> int:
        return self.total - self.free

    @property
    def waited_s(self) -> float:
        """Seconds that the worker asked for tickets, each times the share of its capacity that was free."""
        self._note()
        return self._idle_s

    async def wait_for(self, permits: int) -> None:
        """Wait until so many are free."""
        while self.free < permits:
            self._changed.clear()
            await self._changed.wait()

    def take(self, permits: int) -> None:
        self._note()
        self.free -= permits

    def give(self, permits: int) -> None:
        self._note()
        self.free += permits
        self._changed.set()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While the worker asks for tickets, its free permits count as idle."""
        self._note()
        self._asking = True
        try:
            yield
        finally:
            self._note()
            self._asking = False

    def _note(self) -> None:
        now = self._clock()
        if self._asking:
            self._idle_s += (now - self._noted_at) * max(self.free, 0) / self.total
        self._noted_at = now
