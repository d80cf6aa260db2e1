"""An episode's time-out, which stands still while it waits for a slot: it is not slow because the worker is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Deadline:
    """Use `limit` around the episode; `paused_s`: seconds that it stood still."""

    def __init__(self, timeout_s: float) -> None:
        self.limit = asyncio.timeout(timeout_s)
        self.paused_s = 0.0
        self._pauses = 0
        self._left = timeout_s
        self._since = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time does not count inside, from the loop's next round on: what need not wait costs nothing. Several may be
        at once."""
        began: list[bool] = []
        soon = asyncio.get_running_loop().call_soon(self._pause, began)
        try:
            yield
        finally:
            soon.cancel()
            if began:
                self._resume()

    def _pause(self, began: list[bool]) -> None:
        began.append(True)
        self._pauses += 1
        if self._pauses == 1 and (ends := self.limit.when()) is not None:
            self._since = asyncio.get_running_loop().time()
            self._left = ends - self._since
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
