"""Lets a few tasks through in each round of the event loop.

The loop runs all that became ready before it looks at anything else: a thousand episodes whose answers come at once
would hold up heartbeats and tickets for as long as a thousand turns take to be read.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_ROUND = 16


class Turnstile:
    """`await turnstile.passed()` returns at once, or in a later round of the loop, first come first served."""

    def __init__(self, per_round: int = PER_ROUND) -> None:
        self._per_round = per_round
        self._left = per_round
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def passed(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _turn(self) -> None:
        """A new round. Goes on until one comes in which nobody passes."""
        busy = self._left < self._per_round
        self._left = self._per_round
        while self._waiting and self._left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # one that was cancelled is
                waiting.set_result(None)
                self._left -= 1
        self._turning = busy or self._left < self._per_round
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
