"""Decides which server pulls a snapshot from whom.

The first `LEARNER_SEATS` servers pull from the learner; each that has the version passes it on to `PEER_SEATS` others
at a time, so that the learner sends about as much to many servers as to a few. A server that has waited twice as long
as a pull takes asks the learner.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from slipstream.weight_sync.transports.http.chunks import CHUNK_BYTES, ChunkList
from slipstream.weight_sync.weights.delta_base import DeltaHistory
from slipstream.weight_sync.weights.snapshot import Snapshot

if TYPE_CHECKING:
    from slipstream.weight_sync.transports.http.blob_server import BlobServer

LEARNER_SEATS = 2
PEER_SEATS = 2
PATIENCE_S = 5.0


@dataclass
class Host:
    """A process that serves a version.

    Attributes:
        url: URL of its bytes.
        seats: Number of servers that may pull from it at once.
        taken: Number of servers that do.
    """

    url: str
    seats: int
    taken: int = 0


class Offer:
    """One snapshot that the blob server serves, and the servers that can pass it on. For use on one event loop.

    Attributes:
        key: The blob's key.
        chunks: Its chunks and their digests.
        holders: Transports that have it open.
    """

    def __init__(self, key: str, url: str, chunks: ChunkList) -> None:
        self.key = key
        self.chunks = chunks
        self.holders = 0
        self._learner = Host(url, LEARNER_SEATS)
        self._peers: list[Host] = []
        self._changed = asyncio.Condition()
        self._slowest_s = 0.0

    @asynccontextmanager
    async def seat(self, own_url: str | None) -> AsyncIterator[list[str]]:
        """Hold a seat for the caller's server. Leaving without an error makes that server a host for others.

        Args:
            own_url: Where the server will serve the bytes, None if nowhere.

        Yields:
            URLs to pull from, in the order to ask; the last is the learner's.
        """
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
                    self.add_peer(own_url)
            elif host in self._peers:
                self._peers.remove(host)
            # Safe when cancelled: only the lock is awaited, and nobody keeps it.
            async with self._changed:
                self._changed.notify_all()

    def add_peer(self, url: str) -> None:
        """Note that a server now serves the bytes at `url`."""
        self._peers.append(Host(url, PEER_SEATS))

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


class Offers:
    """The snapshots that a blob server serves, each while a transport has it open. May be used from any thread.

    Attributes:
        history: The deltas between them.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(self, blob_server: BlobServer) -> None:
        self.history = DeltaHistory()
        self._blob_server = blob_server
        self._lock = threading.Lock()
        self._open: dict[Snapshot, Offer] = {}
        self._chunks: WeakKeyDictionary[Snapshot, ChunkList] = WeakKeyDictionary()

    def open(self, snapshot: Snapshot, chunk_bytes: int = CHUNK_BYTES) -> Offer:
        """Return the offer of `snapshot`, which must not change until all who opened it have closed it.

        Blocks while it is hashed, once for each snapshot.
        """
        with self._lock:
            offer = self._open.get(snapshot)
            if offer is None:
                chunks = self._chunks.get(snapshot)
                if chunks is None or chunks.chunk_bytes != chunk_bytes:
                    chunks = self._chunks[snapshot] = ChunkList.of(snapshot.flat, chunk_bytes)
                key = self._blob_server.put(snapshot.flat)
                offer = self._open[snapshot] = Offer(key, self._blob_server.url_of(key), chunks)
            offer.holders += 1
            return offer

    def close(self, offer: Offer) -> None:
        """Give an offer back. It is served until its last holder has."""
        with self._lock:
            offer.holders -= 1
            if offer.holders:
                return
            self._blob_server.drop(offer.key)
            self._open = {snapshot: other for snapshot, other in self._open.items() if other is not offer}
