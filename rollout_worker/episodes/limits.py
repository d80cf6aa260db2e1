"""An episode's time-out, which stands still while it waits for a slot, or an agent for its thread: it is not slow
because the worker is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from rollout_worker.episodes.capacity import Capacity


class Deadline:
    """Use `limit` around the episode; `paused_s`: seconds that it stood still."""

    def __init__(self, timeout_s: float) -> None:
        self.limit = asyncio.timeout(timeout_s)
        self.paused_s = 0.0
        self._pauses = 0
        self._left = timeout_s
        self._since = 0.0

    @contextlib.asynccontextmanager
    async def slot(self, capacity: Capacity, begun: bool) -> AsyncIterator[None]:
        """A slot for one turn; `begun`: the episode has sampled a turn before."""
        async with contextlib.AsyncExitStack() as held:
            with self.paused():
                await held.enter_async_context(capacity.turn(begun))
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time does not count inside. Only what is still inside in the loop's next round pauses it: what need not wait
        costs nothing. Several may be at once."""
        loop = asyncio.get_running_loop()
        began: list[bool] = []
        soon = loop.call_soon(self._pause, began, loop.time())
        try:
            yield
        finally:
            soon.cancel()
            if began:
                self._resume()

    def _pause(self, began: list[bool], since: float) -> None:
        began.append(True)
        self._pauses += 1
        if self._pauses == 1 and (ends := self.limit.when()) is not None:
            self._since = since
            self._left = ends - since
            self._move(None)

    def _resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0:
            now = asyncio.get_running_loop().time()
            self.paused_s += now - self._since
            self._move(now + self._left)

    def _move(self, ends: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the episode is over
            self.limit.reschedule(ends)
