"""Tells the pages that are open what is new: each event is made once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from slipstream.protocol import codec, reasons
from slipstream.rollout_queue.ledger.records import Refusal

MAX_VIEWERS = 64

# Events that a page may be behind. One that reads too slowly is left, and asks for everything again.
_MAX_BEHIND = 256

# A page that hears nothing for so long takes its connection for lost, seconds.
_QUIET_S = 15.0


class Viewers:
    """The open pages."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def __len__(self) -> int:
        return len(self._queues)

    def tell(self, event: str, data: Any) -> None:
        """Send an event to every page, as a server-sent event."""
        if self._queues:
            self._send(b"event: " + event.encode() + b"\ndata: " + codec.encode_json(data) + b"\n\n")

    def end(self) -> None:
        """End all streams, since the service is about to stop."""
        self._send(None)

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield what is sent from now on, until the page is too slow or the service ends."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_BEHIND)
        self._queues.add(queue)
        try:
            yield b": slipstream\n\n"
            while True:
                try:
                    async with asyncio.timeout(_QUIET_S):
                        sent = await queue.get()
                except TimeoutError:
                    sent = b": still here\n\n"
                if sent is None:
                    return
                yield sent
        finally:
            self._queues.discard(queue)

    def check_room(self) -> None:
        """Refuse one more page (BUSY) while `MAX_VIEWERS` are open."""
        if len(self._queues) >= MAX_VIEWERS:
            raise Refusal(reasons.BUSY, f"{MAX_VIEWERS} pages are open: close one, or try again later", 30.0)

    def _send(self, sent: bytes | None) -> None:
        for queue in list(self._queues):
            try:
                queue.put_nowait(sent)
            except asyncio.QueueFull:
                self._queues.discard(queue)
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
