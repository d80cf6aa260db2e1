"""The learner's end of the http transport: tells each server which chunks to pull, and from which URLs.

Servers only open connections, to the learner and to each other. Bytes travel unencrypted: `weight_sync.host` must be an
address in a network that you trust, or a tunnel.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from typing import Any

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.transports.base import Sender, Sent, TransferError
from slipstream.weight_sync.transports.http import chunks
from slipstream.weight_sync.transports.http.blob_server import BlobServer, SharedBlobServers
from slipstream.weight_sync.transports.http.chunks import ChunkList, digest_of
from slipstream.weight_sync.transports.http.offers import Offer
from slipstream.weight_sync.transports.http.receiver import DeltaInfo, HttpInitInfo, HttpUpdateInfo
from slipstream.weight_sync.weights.delta_base import DeltaBase, DeltaPath
from slipstream.weight_sync.weights.snapshot import Snapshot

BLOB_SERVERS = SharedBlobServers()

# Share of `weight_sync.timeout_s` after which a pull ends by itself, so that its words reach the learner in time.
PULL_SHARE = 0.9

_PROCESS = secrets.token_hex(8)


# Transfer keys of this process's open connections, which publishers take on their own threads.
_keys: set[str] = set()
_keys_lock = threading.Lock()


def _take_key(server_url: str) -> str:
    """Return a transfer key that no open connection has. A later connection to a server has the key of an earlier one,
    and so continues with a pull that broke off there."""
    with _keys_lock:
        for number in itertools.count():
            key = digest_of(memoryview(f"{_PROCESS} {number} {server_url}".encode()))[:16]
            if key not in _keys:
                break
        _keys.add(key)
        return key


class HttpSender(Sender):
    """See `Sender`. All senders of a process share one blob server for each address.

    Attributes:
        key: Name of the transfer at the server, "" before `open`.
    """

    def __init__(self, section: WeightSyncSection) -> None:
        self.key = ""
        self._section = section
        self._blob_server: BlobServer | None = None
        self._server_url = ""
        self._base = DeltaBase(section.full_every)
        self._offer: Offer | None = None
        self._path: DeltaPath | None = None
        # Ends what the running offer holds.
        self._held = AsyncExitStack()

    async def open(self, server_url: str, workers: int) -> dict[str, Any]:
        section, self._server_url = self._section, server_url
        self.key = _take_key(server_url)
        self._base = DeltaBase(section.full_every)
        self._blob_server = blob_server = await on_thread(
            BLOB_SERVERS.take, section.host, section.http_port, section.http_mbytes_per_s
        )
        timeout_s, rate = PULL_SHARE * section.timeout_s, section.http_mbytes_per_s
        return asdict(HttpInitInfo(self.key, blob_server.secret, timeout_s, rate, section.bucket_bytes))

    async def offer(self, snapshot: Snapshot) -> dict[str, Any]:
        blob_server = self._blob_server
        if blob_server is None:
            raise TransferError("the transport is not connected")
        offers = blob_server.offers
        chunk_bytes = min(self._section.bucket_bytes, offers.chunk_bytes)
        self._offer = offer = await on_thread(offers.open, snapshot, chunk_bytes, discard=offers.close)
        self._held.callback(offers.close, offer)
        found = await on_thread(self._base.find_path, offers.history, snapshot) if self._section.delta else None
        if found is None:
            self._path, delta = None, None
            urls = await self._held.enter_async_context(offer.seat(self._own_url))
        else:
            self._path, base = found
            delta = asdict(await self._put_delta(blob_server, self._path, base))
            urls = [blob_server.url_of(offer.key)]
        return asdict(HttpUpdateInfo(snapshot.manifest.as_dict(), offer.chunks.as_dict(), urls, delta))

    async def done(self, snapshot: Snapshot, whole: bool) -> Sent:
        offer, path, held = self._offer, self._path, self._held
        self._offer, self._path, self._held = None, None, AsyncExitStack()
        if offer is not None and whole:
            if path is not None:
                offer.add_peer(self._own_url)
            self._base.arrived(snapshot, offer.chunks.root, by_delta=path is not None)
        with suppress(TransferError):
            async with held:
                if not whole:
                    raise TransferError("the server does not have it")  # so that nobody is sent there for it
        return Sent.of(snapshot, path)

    async def close(self) -> None:
        blob_server, self._blob_server = self._blob_server, None
        if blob_server is not None:
            _keys.discard(self.key)
            await on_thread(BLOB_SERVERS.leave, blob_server)

    @property
    def _own_url(self) -> str:
        """Where the server passes on what it has pulled."""
        return self._server_url + chunks.CHUNKS_PREFIX + self.key

    async def _put_delta(self, blob_server: BlobServer, path: DeltaPath, base: str) -> DeltaInfo:
        payload = path.joined
        key = blob_server.put(payload)
        self._held.callback(blob_server.drop, key)
        chunks = await on_thread(ChunkList.of, payload)
        return DeltaInfo(base, blob_server.url_of(key), chunks.as_dict(), [len(part) for part in path.payloads])
