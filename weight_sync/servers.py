"""The vLLM servers, as the queue knows them: one is brought to a version, and the queue is told what came of it.

A server whose proof holds is `serving`; one that fails is quarantined (I5), and so is one that is left paused (I6).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from protocol.client import QueueClient, QueueError, Refused
from protocol.config import RunConfig
from protocol.messages import Server, ServerState
from weight_sync.cancellation import to_its_end
from weight_sync.server_control import ServerControl
from weight_sync.server_sync import PUBLISH_ERRORS, Outcome, ServerSync
from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import Transport

logger = logging.getLogger(__name__)

# How long a publication that is cancelled tries to take a server out of service.
QUARANTINE_TIMEOUT_S = 5.0


class Servers:
    """Keeps a connection to each server that was asked for; an async context manager, which closes them at its end.

    session: tells the learner's session at the queue, which alone may say that a server is proven; it is asked anew
    each time, as there is none yet when this is made. make_transport: makes one for each connection to a server.
    """

    def __init__(
        self,
        config: RunConfig,
        client: QueueClient,
        make_transport: Callable[[], Transport],
        session: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._client = client
        self._make_transport = make_transport
        self._session = session
        self._resources = AsyncExitStack()
        self._syncs: dict[str, ServerSync] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sync in self._syncs.values():
            await sync.disconnect()
        await self._resources.aclose()

    async def known(self) -> list[Server]:
        """Those that are registered. Raises `QueueError`."""
        return await self._client.servers()

    async def is_up(self, server: Server) -> bool:
        """Whether it answers."""
        return await (await self._sync_of(server)).control.is_up()

    async def publish(self, server: Server, snapshot: Snapshot, patience_s: float) -> Outcome | str:
        """The outcome, or why there is none. `patience_s`: how long to wait for a server that is still starting.

        Raises `QueueError` where the queue fails; that it refuses what it is told is a reason.
        """
        try:
            return await self._sync_and_register(server, snapshot, patience_s)
        except Refused as refusal:
            # It registered again or was taken out in between; the next publication takes it as it is then.
            logger.warning("%s: %s", server.name, refusal)
            return f"{server.name}: {refusal}"
        except asyncio.CancelledError:
            sync = self._syncs.get(server.url)
            if sync is not None and sync.left_paused:
                await to_its_end(self._leave_quarantined(server, snapshot.version))
            raise

    async def _sync_and_register(self, server: Server, snapshot: Snapshot, patience_s: float) -> Outcome | str:
        """The outcome, or why the server was left to start or quarantined."""
        sync = await self._sync_of(server)
        if not patience_s and server.state is ServerState.JOINING and not await sync.control.is_up():
            return f"{server.url}: still starting"
        if server.state is not ServerState.SERVING:
            await self._register(server, ServerState.SYNCING, server.version)
        try:
            if patience_s and not sync.connected:
                await sync.control.wait_until_up(patience_s)
            async with asyncio.timeout(self._config.weight_sync.timeout_s):
                outcome = await sync.publish(snapshot)
        except (*PUBLISH_ERRORS, TimeoutError) as error:
            reason = str(error) or f"{server.url}: not done within {self._config.weight_sync.timeout_s:g} s"
            logger.error("%s is quarantined: %s", server.name, reason)
            await self._register(server, ServerState.QUARANTINED, snapshot.version, reason)
            return reason
        await self._register(server, ServerState.SERVING, snapshot.version)
        return outcome

    async def _leave_quarantined(self, server: Server, version: int) -> None:
        """Take a server that is left paused out of service (I6), if the queue answers in time."""
        reason = f"{server.url}: left paused: the learner ended before it had loaded version {version}"
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                await self._register(server, ServerState.QUARANTINED, version, reason)
        except (QueueError, TimeoutError) as error:
            logger.error("%s is left paused and could not be quarantined: %s", server.name, error or "no answer")

    async def _sync_of(self, server: Server) -> ServerSync:
        sync = self._syncs.get(server.url)
        if sync is None:
            section = self._config.weight_sync
            control = await self._resources.enter_async_context(
                ServerControl(server.url, section.timeout_s, self._config.token)
            )
            config = self._config
            sync = self._syncs[server.url] = ServerSync(
                control, self._make_transport, config.probe_tolerance, config.served_dtype, config.served_quantised
            )
        return sync

    async def _register(
        self, server: Server, state: ServerState, version: int | None, reason: str | None = None
    ) -> None:
        await self._client.put_server(Server(server.name, server.url, state, version, reason), self._session())
