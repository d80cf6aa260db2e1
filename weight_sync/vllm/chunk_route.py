"""Serves a server's staged snapshot to other servers: `GET /slipstream/chunks/<transfer key>`.

vLLM's API process answers. It shares the host and the user with the workers that staged the snapshot.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from slipstream.weight_sync.transports.http import chunks
from slipstream.weight_sync.transports.http.chunks import digest_of
from slipstream.weight_sync.transports.http.listener import Throttle
from slipstream.weight_sync.transports.http.staging import record_of

Scope = MutableMapping[str, Any]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STALL_TIMEOUT_S = 60.0

_throttles: dict[float, Throttle] = {}


async def serve_chunks(scope: Scope, send: Send) -> None:
    """Answer one ASGI request whose path begins with `CHUNKS_PREFIX`.

    The status is 206 with the bytes asked for, 401 without the transfer's secret, 404 if nothing is staged whole, 412
    for another version, or 416 for a bad range.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    if scope["method"] != "GET":
        await _refuse(send, 405, "ask with GET")
        return
    record = record_of(scope["path"].removeprefix(chunks.CHUNKS_PREFIX))
    given = headers.get(b"authorization", "").removeprefix("Bearer ")
    if record is None or not record.holds:
        await _refuse(send, 404, "nothing is staged here")
        return
    if not chunks.equal_secrets(digest_of(memoryview(given.encode())), record.secret_hash):
        await _refuse(send, 401, "the transfer's secret is needed")
        return
    if headers.get(b"if-match") != f'"{record.holds}"':
        await _refuse(send, 412, "another version is staged here")
        return
    found = chunks.parse_range(headers.get(b"range", ""), record.total_bytes)
    if found is None:
        await _refuse(send, 416, f"ask for one range within {record.total_bytes} bytes")
        return
    try:
        fd = record.open()
    except OSError:
        await _refuse(send, 404, "what was staged here is gone")
        return
    try:
        await _send_range(
            send, fd, *found, _throttles.setdefault(record.mbytes_per_s, Throttle(record.mbytes_per_s * 1e6))
        )
    finally:
        os.close(fd)


async def _send_range(send: Send, fd: int, start: int, end: int, throttle: Throttle) -> None:
    """Send a range of the buffer. If another version is received meanwhile, the caller's digests show it."""
    length = str(end - start).encode()
    await send({"type": "http.response.start", "status": 206, "headers": [(b"content-length", length)]})
    for at in range(start, end, chunks.SLICE_BYTES):
        count = min(chunks.SLICE_BYTES, end - at)
        await throttle.pass_on(count)
        body = os.pread(fd, count, at)
        async with asyncio.timeout(STALL_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": at + count < end})


async def _refuse(send: Send, status: int, text: str) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
