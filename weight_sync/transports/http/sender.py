"""The learner's end of the http transport: tells each server which chunks to pull, and from which URLs.

Servers only open connections, to the learner and to each other. Bytes travel unencrypted: `weight_sync.host` must be an
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
from weight_sync.transports.http.blob_server import BlobServer, SharedBlobServers
from weight_sync.transports.http.chunks import ChunkList
from weight_sync.transports.http.offers import Offer
from weight_sync.transports.http.receiver import DeltaInfo, HttpInitInfo, HttpUpdateInfo
from weight_sync.weights.delta_base import DeltaBase, DeltaPath
from weight_sync.weights.snapshot import Snapshot

BLOB_SERVERS = SharedBlobServers()


class HttpTransport(StagedTransport):
    """See `StagedTransport`. All transports of a process share one blob server for each address."""

    def __init__(self, section: WeightSyncSection) -> None:
        super().__init__(section)
        self._blob_server: BlobServer | None = None
        self.key = secrets.token_hex(8)
        self._base = DeltaBase(section.full_every)

    @property
    def connected(self) -> bool:
        return self._blob_server is not None

    async def connect(self, server: ServerControl, workers: int) -> None:
        await server.end_transfer()
        section = self._section
        self._base = DeltaBase(section.full_every)
        self._blob_server = blob_server = await on_thread(
            BLOB_SERVERS.take, section.host, section.http_port, section.http_mbytes_per_s
        )
        greeting = blob_server.put(torch.ones(1, dtype=torch.uint8))
        url = blob_server.url_of(greeting)
        try:
            await server.init_transfer(
                asdict(HttpInitInfo(self.key, blob_server.secret, url, section.timeout_s, section.http_mbytes_per_s))
            )
            if not blob_server.asked(greeting):
                raise TransferError(
                    f"{server.url}: its workers did not come to {blob_server.url}: is that where they reach the "
                    f"learner? Set weight_sync.host, and a weight_sync.http_port that is open to them"
                )
        finally:
            blob_server.drop(greeting)

    async def bring(self, server: ServerControl, snapshot: Snapshot) -> None:
        blob_server = self._blob_server
        if blob_server is None:
            raise TransferError("the transport is not connected")
        offers = blob_server.offers
        offer = await on_thread(offers.open, snapshot, min(self._section.bucket_bytes, offers.chunk_bytes))
        own = server.url + chunks.CHUNKS_PREFIX + self.key
        try:
            found = await on_thread(self._base.find_path, offers.history, snapshot) if self._section.delta else None
            if found is not None:
                await self._bring_delta(blob_server, server, snapshot, offer, *found)
                offer.add_peer(own)
            else:
                async with offer.seat(own) as urls:
                    await self._tell(server, snapshot, offer, urls, None)
            self.sent = Sent.of(snapshot, found and found[0])
            self._base.arrived(snapshot, offer.chunks.root, by_delta=found is not None)
        finally:
            offers.close(offer)

    async def close(self) -> None:
        blob_server, self._blob_server = self._blob_server, None
        if blob_server is not None:
            await on_thread(BLOB_SERVERS.leave, blob_server)

    async def _bring_delta(
        self,
        blob_server: BlobServer,
        server: ServerControl,
        snapshot: Snapshot,
        offer: Offer,
        path: DeltaPath,
        base: str,
    ) -> None:
        payload = path.joined
        key = blob_server.put(payload)
        try:
            chunks = await on_thread(ChunkList.of, payload)
            delta = DeltaInfo(base, blob_server.url_of(key), chunks.as_dict(), [len(part) for part in path.payloads])
            await self._tell(server, snapshot, offer, [blob_server.url_of(offer.key)], asdict(delta))
        finally:
            blob_server.drop(key)

    async def _tell(
        self, server: ServerControl, snapshot: Snapshot, offer: Offer, urls: list[str], delta: dict[str, Any] | None
    ) -> None:
        """Tell the server which chunks to pull from which URLs. Returns when its workers have built the model."""
        info = HttpUpdateInfo(snapshot.manifest.as_dict(), offer.chunks.as_dict(), urls, delta)
        await server.update(asdict(info))
        await self._until_staged(server)
