"""The fleet as one worker sees it: the router, waiting for a server, and telling the queue of a stale one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from protocol.messages import Server, ServerState
from rollout_worker.inference.router import Affinity, Router

logger = logging.getLogger(__name__)

ReportServer = Callable[[Server], Awaitable[None]]


class ServerPool:
    """Servers to sample from. `report` tells the queue of a server's new state."""

    def __init__(self, report: ReportServer) -> None:
        self._router = Router()
        self._report = report
        self._serving = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self._serving.is_set()

    async def wait_serving(self) -> None:
        await self._serving.wait()

    def update(self, servers: Iterable[Server]) -> None:
        """Take over the registry, as it came with an answer of the queue."""
        self._router.update(servers)
        self._note()

    async def place(self, affinities: Sequence[Affinity], avoid: str | None = None) -> Server:
        """One server for all the affinities; waits for as long as none serves."""
        while True:
            server = self._router.place(affinities, avoid)
            if server is not None:
                return server
            await self._serving.wait()

    def release(self, affinities: Sequence[Affinity]) -> None:
        self._router.release(affinities)

    def saw_version(self, name: str, version: int) -> None:
        self._router.saw_version(name, version)

    async def distrust(self, name: str, label: str) -> None:
        """The server samples from weights labelled `label`, which is no version: use it no more, and say so."""
        server = self._router.distrust(name)
        if server is None:
            return
        self._note()
        reason = f"sampled from weights labelled {label!r}"
        logger.warning("%s %s: it is not used until it is proven again", name, reason)
        await self._report(Server(name, server.url, ServerState.STALE, None, reason))

    def _note(self) -> None:
        if self._router.serving:
            self._serving.set()
        else:
            self._serving.clear()
