"""When user code is shut off for good: so many calls hang that no more are begun, and none of them comes back.

Code that is slow comes back, and makes room; only code that hangs does not. What decides is whether any has come back,
not for how long calls were refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

# None has come back for so long: this many times the longest time-out, and seconds at least.
TIMEOUTS = 4
AT_LEAST_S = 60.0


class Source(Protocol):
    """Where calls hang. `full`: so many that no more are begun; `came_back`: how many that hung ever did; `longest_s`:
    the longest time-out; `hanging`: which functions, and where; `remedy`: what to do about it."""

    longest_s: float
    remedy: str

    @property
    def full(self) -> bool: ...
    @property
    def came_back(self) -> int: ...
    def hanging(self) -> str: ...


class ShutOff:
    """Watches sources that are full; `told` gets why user code is shut off, when it is for good."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._watched: dict[Source, asyncio.TimerHandle] = {}

    def look(self, source: Source) -> None:
        """To be called at each call that begins to hang, on the event loop."""
        if source.full and source not in self._watched:
            self._wait(source)

    def close(self) -> None:
        while self._watched:
            self._watched.popitem()[1].cancel()

    def _wait(self, source: Source) -> None:
        seconds = max(AT_LEAST_S, TIMEOUTS * source.longest_s)
        loop = asyncio.get_running_loop()
        self._watched[source] = loop.call_later(seconds, self._check, source, source.came_back, seconds)

    def _check(self, source: Source, came_back: int, seconds: float) -> None:
        del self._watched[source]
        if not source.full:
            return
        if source.came_back > came_back:
            self._wait(source)
            return
        self._told(
            f"user code is shut off: {source.hanging()}; none has come back for {seconds:g} s, and no more are begun: "
            f"{source.remedy}"
        )
