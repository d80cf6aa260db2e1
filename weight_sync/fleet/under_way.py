"""One server's publication while it is under way: bounded in time, watched, and given up for a newer version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from weight_sync.fleet.server_publication import Outcome
from weight_sync.server.control import LOOK_TIMEOUT_S, NO_ANSWER, ControlError, ServerControl

# A server that is up to date is looked at so often, to notice that it restarted; others as often at first.
LOOK_EVERY_S = 2.0


class UnderWay:
    """At most one publication at a time. `heard`: takes why the engine gives no answer, None where it does,
    and when it was asked;
    `given_up`: whether the last one was, by `let_go`."""

    def __init__(
        self, control: ServerControl, heard: Callable[[str | None, float], Awaitable[None]], timeout_s: float
    ) -> None:
        self.given_up = False
        self._control = control
        self._heard = heard
        self._timeout_s = timeout_s
        self._publishing: asyncio.Task[Outcome] | None = None

    def let_go(self) -> None:
        """End it, for the sake of its snapshot."""
        if self._publishing is not None:
            self.given_up = True
            self._publishing.cancel()

    async def run(self, publication: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Raises what the publication raises, and `TimeoutError`."""

        async def publish() -> Outcome:
            async with asyncio.timeout(self._timeout_s):
                return await publication()

        self.given_up = False
        self._publishing = asyncio.ensure_future(publish())
        try:
            await self._look_beside(self._publishing)
            return await self._publishing
        except asyncio.CancelledError:
            if not self._publishing.done():
                self._publishing.cancel()
                await asyncio.wait([self._publishing])
            raise
        finally:
            self._publishing = None

    async def _look_beside(self, publishing: asyncio.Task[Outcome]) -> None:
        """Until the publication ends: an engine that hangs in it is down soon, though the publication may wait for long
        yet, as what it is sampling holds up everybody."""
        while not publishing.done():
            await asyncio.wait([publishing], timeout=LOOK_EVERY_S)
            if publishing.done():
                return
            asked = time.monotonic()
            look = asyncio.ensure_future(self._silence())
            try:
                await asyncio.wait([publishing, look], return_when=asyncio.FIRST_COMPLETED)
            finally:
                look.cancel()
            if publishing.done() or not look.done():
                return
            await self._heard(look.result(), asked)

    async def _silence(self) -> str | None:
        """Why the engine gives no answer; None where it does, or where the load in place that is under way holds it."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                state = await self._control.state()
        except (ControlError, TimeoutError) as error:
            return str(error) or f"{self._control.url}: no answer within {LOOK_TIMEOUT_S:g} s"
        if state.alive or state.pause_owner == "publication":
            return None
        return f"{self._control.url}: {state.reason or NO_ANSWER}"
