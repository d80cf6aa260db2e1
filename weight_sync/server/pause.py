"""The pause of one server during one publication: who ends it, and how long it lasted (I6)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from weight_sync.server.cancellation import shielded
from weight_sync.server.control import ControlError, ServerControl

# How long a server waits for a learner that went away inside a pause.
LEASE_S = 15.0


@dataclass
class Pause:
    """What a transport gets to pause its server with.

    clear_cache: whether the pause must drop cached keys and values.
    resume_after_error: False where an error inside may leave the model half loaded; the server then stays paused.
    due: set once generation may stand still; None if it may at once.
    left_paused: the server may stand still and nobody will resume it; it must not serve.
    seconds: how long generation stood still. A transport whose server pauses itself adds what the server reports.
    """

    server: ServerControl
    clear_cache: bool
    resume_after_error: bool
    due: asyncio.Event | None = None
    left_paused: bool = False
    seconds: float = 0.0

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Generation stands still inside. Resumes at the end even if the calling task is cancelled; after an error or
        a cancellation inside only with `resume_after_error`. The pause is a lease, renewed while it is held. Raises
        `ControlError`."""
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
        if self.due is not None:
            await self.due.wait()

    async def _renew(self) -> None:
        """Keep the lease while this process lives; the server ends the pause of one that does not renew it."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with contextlib.suppress(ControlError):  # the next call of the transport meets it too
                await self.server.lease(LEASE_S)

    async def _resume(self) -> None:
        await self.server.resume()
        self.left_paused = False
