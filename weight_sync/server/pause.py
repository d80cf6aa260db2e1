"""Pauses one server during one publication, and makes sure that the pause ends (I6)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from slipstream.weight_sync.server.cancellation import shielded
from slipstream.weight_sync.server.engine import ControlError, Engine

# Seconds for which a server stays paused after its learner disappeared.
LEASE_S = 15.0


@dataclass
class Pause:
    """Lets a transport pause its server.

    Attributes:
        clear_cache: Whether the pause must drop cached keys and values.
        resume_after_error: False if an error during the pause may leave the model half loaded: the server then stays
            paused.
        due: Set once generation may stand still; None if it may at once.
        left_paused: Whether the server may stand still with nobody to resume it. It must not serve then.
        seconds: How long generation stood still. A transport whose server pauses itself adds what the server reports.
    """

    server: Engine
    clear_cache: bool
    resume_after_error: bool
    due: asyncio.Event | None = None
    left_paused: bool = False
    seconds: float = 0.0

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold generation still inside the context, under a lease that is renewed.

        Resumes at the end even if the calling task is cancelled; after an error or a cancellation inside the context
        only with `resume_after_error`.

        Raises:
            ControlError: A call to the server failed.
        """
        await self.until_due()
        began = time.monotonic()
        self.left_paused = True
        resume = self.resume_after_error
        renewing = asyncio.create_task(self._renew())
        try:
            await self.server.pause(self.clear_cache)
            yield
            resume = True
        finally:
            renewing.cancel()
            if resume:
                await shielded(self._resume())
            self.seconds += time.monotonic() - began

    async def until_due(self) -> None:
        """Wait until generation may stand still."""
        if self.due is not None:
            await self.due.wait()

    async def _renew(self) -> None:
        """Renew the lease while this process lives. The server ends a pause that is not renewed."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with contextlib.suppress(ControlError):  # the transport's next call fails too, and reports it
                await self.server.lease(LEASE_S)

    async def _resume(self) -> None:
        await self.server.resume()
        self.left_paused = False
