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
        """Time does not count inside; several may be at once."""
        loop = asyncio.get_running_loop()
        if self._pauses == 0 and (ends := self.limit.when()) is not None:
            self._since, self._left = loop.time(), ends - loop.time()
            self._move(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self.paused_s += loop.time() - self._since
                self._move(loop.time() + self._left)

    def _move(self, ends: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the episode is over
            self.limit.reschedule(ends)
