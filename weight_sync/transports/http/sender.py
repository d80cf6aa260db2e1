"""The learner's end of the http transport: it tells a server what to pull from whom; `depot` serves it.

Servers only dial out, to the learner and to each other. The bytes travel as they are: let `weight_sync.host` be an
address in a network that you trust, or a tunnel.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any

import torch

from protocol.config import WeightSyncSection
from weight_sync.server.cancellation import on_thread
from weight_sync.server.control import ServerControl
from weight_sync.transports.base import Sent, StagedTransport, TransferError
from weight_sync.transports.http import chunks
from weight_sync.transports.http.blob_server import BlobServer, Offer, SharedDepots
from weight_sync.transports.http.chunks import ChunkList
from weight_sync.transports.http.receiver import DeltaInfo, HttpInitInfo, HttpUpdateInfo
from weight_sync.weights.delta_base import DeltaBase, DeltaPath
from weight_sync.weights.snapshot import Snapshot

DEPOTS = SharedDepots()


class HttpTransport(StagedTransport):
    """See `StagedTransport`. All transports of a process share one depot."""

    def __init__(self, section: WeightSyncSection) -> None:
        super().__init__(section)
        self._depot: BlobServer | None = None
        self._key = secrets.token_hex(8)
        self._held = DeltaBase(section.full_every)

    @property
    def connected(self) -> bool:
        return self._depot is not None

    async def connect(self, server: ServerControl, workers: int) -> None:
        await server.end_transfer()
        section = self._section
        self._held = DeltaBase(section.full_every)
        self._depot = depot = await on_thread(DEPOTS.take, section.host, section.http_port, section.http_mbytes_per_s)
        greeting = depot.put(torch.ones(1, dtype=torch.uint8))
        url = depot.url_of(greeting)
        try:
            await server.init_transfer(
                asdict(HttpInitInfo(self._key, depot.secret, url, section.timeout_s, section.http_mbytes_per_s))
            )
            if not depot.asked(greeting):
                raise TransferError(
                    f"{server.url}: its workers did not come to {depot.url}: is that where they reach the learner? "
                    f"Set weight_sync.host, and a weight_sync.http_port that is open to them"
                )
        finally:
            depot.drop(greeting)

    async def bring(self, server: ServerControl, snapshot: Snapshot) -> None:
        depot = self._depot
        if depot is None:
            raise TransferError("the transport is not connected")
        offers = depot.offers
        offer = await on_thread(offers.open, snapshot, min(self._section.bucket_bytes, offers.chunk_bytes))
        own = server.url + chunks.CHUNKS_PREFIX + self._key
        try:
            found = await on_thread(self._held.way, offers.book, snapshot) if self._section.delta else None
            if found is not None:
                await self._bring_delta(depot, server, snapshot, offer, *found)
                offer.add_peer(own)
            else:
                async with offer.seat(own) as urls:
                    await self._tell(server, snapshot, offer, urls, None)
            self.sent = Sent.of(snapshot, found and found[0])
            self._held.arrived(snapshot, offer.chunks.root, by_delta=found is not None)
        finally:
            offers.close(offer)

    async def close(self) -> None:
        depot, self._depot = self._depot, None
        if depot is not None:
            await on_thread(DEPOTS.leave, depot)

    async def _bring_delta(
        self, depot: BlobServer, server: ServerControl, snapshot: Snapshot, offer: Offer, way: DeltaPath, base: str
    ) -> None:
        payload = way.joined
        key = depot.put(payload)
        try:
            chunks = await on_thread(ChunkList.of, payload)
            delta = DeltaInfo(base, depot.url_of(key), chunks.as_dict(), [len(part) for part in way.payloads])
            await self._tell(server, snapshot, offer, [depot.url_of(offer.key)], asdict(delta))
        finally:
            depot.drop(key)

    async def _tell(
        self, server: ServerControl, snapshot: Snapshot, offer: Offer, urls: list[str], delta: dict[str, Any] | None
    ) -> None:
        """Returns when the server has pulled and built."""
        info = HttpUpdateInfo(snapshot.manifest.as_dict(), offer.chunks.as_dict(), urls, delta)
        await server.update(asdict(info))
        await self._until_staged(server)
