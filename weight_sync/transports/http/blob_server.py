"""Serves bytes in ranges from the learner, by HTTP on a thread.

A blob is known by a random key, and every request must bring the blob server's random secret; servers learn both over
the control plane. Only a path, a range and a secret are read, so nothing that a stranger sends is ever decoded.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from typing import Self

import torch
from aiohttp import web

from slipstream.protocol.config.sections.base import url_of
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http import chunks
from slipstream.weight_sync.transports.http.chunks import bytes_of
from slipstream.weight_sync.transports.http.listener import Listener, Throttle, admit, listen
from slipstream.weight_sync.transports.http.offers import Offers

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0

# Seconds without a read after which a receiver counts as stopped or gone.
STALL_TIMEOUT_S = 60.0


class BlobServer:
    """Serves blobs from `put` to `drop`, both of which may be called from any thread.

    Attributes:
        secret: To be brought with every request, in hex.
        served: Bytes sent so far.
        offers: The snapshots among its blobs.
        holders: Number of those that share it (`SharedBlobServers`).
    """

    def __init__(self, host: str, port: int = 0, mbytes_per_s: float = 0.0) -> None:
        """Prepare to listen.

        Args:
            host: Name or address to listen at.
            port: Port to listen at, 0 for a free one.
            mbytes_per_s: Bound over all who pull, in 10**6 bytes per second; 0 for none.
        """
        self.secret = secrets.token_hex(16)
        self.served = 0
        self.holders = 0
        self._host, self._port = host, port
        self._throttle = Throttle(mbytes_per_s * 1e6)
        self._blobs: dict[str, memoryview] = {}
        self.offers = Offers(self)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-blobs", daemon=True)
        self._runner: web.ServerRunner | None = None
        self._listener: Listener | None = None
        self._sockets: list[socket.socket] = []
        self._admitting: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """The URL that it listens at."""
        return url_of(self._host, self._port)

    def start(self) -> None:
        """Start to listen. Raises `TransferError` if it cannot."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            self.stop()
            raise TransferError(
                f"weight_sync.host = {self._host}, weight_sync.http_port = {self._port}: cannot listen there: {error}; "
                f"name an address of the learner's machine and a port that is free (0: any)"
            ) from error

    def stop(self) -> None:
        """Stop listening and cut off running requests."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(START_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def put(self, flat: torch.Tensor) -> str:
        """Serve a uint8 tensor on the host, which must not change until its key is dropped. Returns the key."""
        key = secrets.token_hex(8)
        self._blobs[key] = bytes_of(flat)
        return key

    def url_of(self, key: str) -> str:
        return self.url + chunks.CHUNKS_PREFIX + key

    def drop(self, key: str) -> None:
        self._blobs.pop(key, None)

    async def _listen(self) -> None:
        self._sockets = listen(self._host, self._port)
        self._port = self._sockets[0].getsockname()[1]
        self._listener = Listener(self._answer)
        self._runner = web.ServerRunner(self._listener, shutdown_timeout=0.5)
        await self._runner.setup()
        self._admitting = [self._loop.create_task(admit(self._listener, socket_)) for socket_ in self._sockets]

    async def _end(self) -> None:
        for task in self._admitting:
            task.cancel()
        await asyncio.gather(*self._admitting, return_exceptions=True)
        for socket_ in self._sockets:
            socket_.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        if not chunks.is_authorized(request.headers.get("Authorization", ""), self.secret):
            return _closing(web.Response(status=401, text="the transfer's secret is needed"))
        if request.method != "GET" or not request.path.startswith(chunks.CHUNKS_PREFIX):
            return _closing(web.Response(status=404, text=f"there is only GET {chunks.CHUNKS_PREFIX}<key> here"))
        assert self._listener is not None
        if transport is None or not self._listener.authenticate(transport):
            if transport is not None:
                transport.abort()
            return web.Response(status=503)  # goes nowhere
        try:
            return await self._chunk(request, request.path.removeprefix(chunks.CHUNKS_PREFIX))
        finally:
            self._listener.finish(transport)

    async def _chunk(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        blob = self._blobs.get(key)
        if blob is None:
            return web.Response(status=404, text="these weights are not served any more")
        found = chunks.parse_range(request.headers.get("Range", ""), len(blob))
        if found is None:
            return web.Response(status=416, text=f"ask for one range within {len(blob)} bytes")
        start, end = found
        response = web.StreamResponse(status=206)
        response.content_length = end - start
        try:
            await response.prepare(request)
            await self._send(request, response, key, blob[start:end])
        except ConnectionError:
            logger.debug("%s went away in the middle of a chunk", request.remote)
        return response

    async def _send(self, request: web.BaseRequest, response: web.StreamResponse, key: str, part: memoryview) -> None:
        """Send `part` in slices, within the bound on bytes. Raises ConnectionError if the receiver disconnects."""
        for at in range(0, len(part), chunks.SLICE_BYTES):
            piece = part[at : at + chunks.SLICE_BYTES]
            await self._throttle.pass_on(len(piece))
            if key not in self._blobs:
                # The buffer may hold another version by now, so nothing more of it is sent.
                if request.transport is not None:
                    request.transport.close()
                return
            self.served += len(piece)
            try:
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await response.write(piece)
            except TimeoutError:
                logger.warning("%s has not read for %g s: its pull is cut off", request.remote, STALL_TIMEOUT_S)
                if request.transport is not None:
                    request.transport.abort()
                return


def _closing(response: web.Response) -> web.Response:
    """Have the connection closed after the response, so that a refused client holds none."""
    response.force_close()
    return response


class SharedBlobServers:
    """Keeps one blob server for each address in this process, while anyone holds it. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, int, float], BlobServer] = {}

    def take(self, host: str, port: int, mbytes_per_s: float) -> BlobServer:
        """Return the blob server of an address, started if nobody holds it. Raises `TransferError`."""
        place = (host, port, mbytes_per_s)
        with self._lock:
            blob_server = self._servers.get(place)
            if blob_server is None:
                blob_server = BlobServer(*place)
                blob_server.start()
                self._servers[place] = blob_server
            blob_server.holders += 1
            return blob_server

    def leave(self, blob_server: BlobServer) -> None:
        """Give a blob server back, once for each `take`. It stops with its last holder."""
        with self._lock:
            blob_server.holders -= 1
            if blob_server.holders:
                return
            self._servers = {place: other for place, other in self._servers.items() if other is not blob_server}
        blob_server.stop()
