"""Who pulls a version from whom, so that the learner sends about as much to many servers as to a few.

The first `LEARNER_SEATS` servers pull from the learner; each that has the version passes it on to `PEER_SEATS` others
at a time. Nobody waits long for a seat: a server that has waited twice as long as a pull takes asks the learner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from weight_sync.transports.http.chunks import ChunkList
from weight_sync.transports.http.depot import Depot

LEARNER_SEATS = 2
PEER_SEATS = 2
PATIENCE_S = 5.0


@dataclass
class Host:
    """One who serves a version: the URL of its bytes, and how many pull from it."""

    url: str
    seats: int
    taken: int = 0


class Offer:
    """One blob that the depot serves, and the servers that can pass it on. For use on one event loop."""

    def __init__(self, depot: Depot, key: str, chunks: ChunkList) -> None:
        self.key = key
        self.chunks = chunks
        self.holders = 0
        self._learner = Host(depot.url_of(key), LEARNER_SEATS)
        self._peers: list[Host] = []
        self._changed = asyncio.Condition()
        self._slowest_s = 0.0

    @asynccontextmanager
    async def seat(self, own_url: str | None) -> AsyncIterator[list[str]]:
        """Inside, the caller's server may pull from the URLs, asked in their order; the last is the learner's. Leaving
        it without an error makes `own_url` (where that server serves the bytes; None: nowhere) a host for others."""
        host = await self._take()
        began = time.monotonic()
        whole = False
        try:
            yield [host.url] if host is self._learner else [host.url, self._learner.url]
            whole = True
        finally:
            host.taken -= 1
            if whole:
                self._slowest_s = max(self._slowest_s, time.monotonic() - began)
                if own_url is not None:
                    self._peers.append(Host(own_url, PEER_SEATS))
            elif host in self._peers:
                self._peers.remove(host)
            # Also when cancelled: nothing is awaited but the lock, which nobody keeps.
            async with self._changed:
                self._changed.notify_all()

    async def _take(self) -> Host:
        patience_s = PATIENCE_S + 2 * self._slowest_s
        try:
            async with asyncio.timeout(patience_s), self._changed:
                while (host := self._free()) is None:
                    await self._changed.wait()
        except TimeoutError:
            host = self._learner
        host.taken += 1
        return host

    def _free(self) -> Host | None:
        hosts = self._peers or [self._learner]
        host = min(hosts, key=lambda host: host.taken)
        return host if host.taken < host.seats else None
