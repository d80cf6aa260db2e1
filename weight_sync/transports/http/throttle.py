"""A bound on the bytes that are sent a second, over all who send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Throttle:
    """Lets `bytes_per_s` pass (0: any number). To be used on one event loop."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    async def pass_on(self, count: int) -> None:
        """Returns when `count` bytes may go."""
        if delay := self.delay(count):
            await asyncio.sleep(delay)

    def delay(self, count: int) -> float:
        """Seconds until `count` bytes may go; they are counted as sent then."""
        if not self._bytes_per_s:
            return 0.0
        now = self._clock()
        starts = max(now, self._free_at)
        self._free_at = starts + count / self._bytes_per_s
        return starts - now
