"""What the queue is told of one server, and what it knows: one line of the log for each state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from protocol.client import QueueError, QueueRefused
from protocol.messages import Server, ServerState
from weight_sync.server.answers import EngineState
from weight_sync.transports.registry import of_backend
from weight_sync.weights.snapshot import Snapshot

logger = logging.getLogger(__name__)

# How long a publication that is cancelled tries to take a server out of service.
QUARANTINE_TIMEOUT_S = 5.0

# In place of a transport's name.
ADAPTER = "adapter"

_S = ServerState

Put = Callable[[Server], Awaitable[Server]]


def way_to(state: EngineState, newest: Snapshot | None) -> str:
    """How weights travel to a server: an adapter alone takes the server's own routes, whatever its transport is."""
    if newest is not None and newest.adapter_config is not None:
        return ADAPTER
    return of_backend(state.transport) or state.transport


class QueueReporter:
    """`server`: as the queue knows it; `told` grows before and after each call, so that an answer to an older question
    can be told from a newer state; `transport`: how weights travel to it, None while it has not said so."""

    def __init__(self, server: Server, put: Put) -> None:
        self.server = server
        self.told = 0
        self.transport: str | None = None
        self._settled_at: float | None = None
        self._put = put

    async def tell(self, state: ServerState, version: int | None = None, reason: str | None = None) -> None:
        """Tell the queue, unless it knows. Raises `QueueError`; `Refused` where it knows better."""
        known = self.server
        if (known.state, known.reason) == (state, reason) and version in (None, known.version):
            return
        if known.state is not state and state is not _S.SERVING:
            level = logging.INFO if state in (_S.SYNCING, _S.JOINING) else logging.WARNING
            logger.log(level, "%s at %s is %s%s", known.name, known.url, state, f": {reason}" if reason else "")
        self.told += 1
        try:
            self.server = await self._put(
                Server(known.name, known.url, state, version, reason, transport=self.transport)
            )
        finally:
            self.told += 1

    async def try_to_tell(self, state: ServerState, version: int | None = None, reason: str | None = None) -> None:
        """`tell`, where a refusal means that the registry has changed, which is looked at soon."""
        with suppress(QueueRefused):
            await self.tell(state, version, reason)

    async def settled(self) -> None:
        """Tell the queue, once a drain, that no version is on its way to a server that drains: it may leave."""
        began = self.server.changed_at
        if self._settled_at != began:
            with suppress(QueueRefused):
                await self._put(Server(self.server.name, self.server.url, _S.DRAINING))
            self._settled_at = began

    async def quarantine(self, version: int, reason: str) -> None:
        """One that is quarantined stays so: it is distrusted from the first version that failed on."""
        if self.server.state is _S.QUARANTINED:
            return
        if self.server.state not in (_S.SYNCING, _S.SERVING, _S.DRAINING):
            await self.try_to_tell(_S.SYNCING)
        await self.try_to_tell(_S.QUARANTINED, version, reason)

    async def publication_failed(
        self, snapshot: Snapshot, reason: str, must_leave: bool, now: EngineState | None
    ) -> None:
        """What a failed publication leaves the server in, which is as it says `now`; None: it does not answer.
        must_leave: its proof failed, or it is left paused."""
        if must_leave:
            await self.quarantine(snapshot.version, reason)
        elif now is not None and now.label == snapshot.label:
            await self.quarantine(snapshot.version, f"swapped, but not proven: {reason}")
        elif now is not None and not now.whole:
            await self.quarantine(snapshot.version, reason)
        elif self.server.state is _S.SERVING:
            # It serves on with what was proven; if it falls too far behind, it is stale.
            logger.warning("%s keeps version %s: %s", self.server.name, self.server.version, reason)
        elif self.server.state not in (_S.QUARANTINED, _S.DRAINING):
            if self.server.state is _S.DOWN:
                await self.try_to_tell(_S.SYNCING)
            await self.try_to_tell(_S.STALE, None, reason)

    async def leave_quarantined(self, version: int) -> None:
        """Take a server that is left paused out of service (I6), if the queue answers in time."""
        server = self.server
        reason = f"{server.url}: left paused: the learner ended before it had loaded version {version}"
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                await self.quarantine(version, reason)
        except (QueueError, TimeoutError) as error:
            logger.error("%s is left paused and could not be quarantined: %s", server.name, error or "no answer")
