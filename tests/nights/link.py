"""A link between two processes that can be cut, slowed and made lossy: it passes on TCP connections to one port."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

CHUNK = 16_384
SLOW_BYTES_PER_S = 60_000.0
# The share of chunks after which a lossy link breaks its connection.
LOSS = 0.02

State = Literal["whole", "cut", "slow", "lossy", "refusing"]

# What a proxy answers whose other side is gone.
_PAGE = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
REFUSAL = (
    b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    % (
        len(_PAGE),
        _PAGE,
    )
)


class Link:
    """Listens on `port` of 127.0.0.1 and passes on to `to`. `state` may be changed from any thread.

    A cut link is silent, as a cable that was pulled: connections stay open, and new ones are taken and not answered. A
    refusing one is a proxy that answers each request with its own page.
    """

    def __init__(self, to: int) -> None:
        self.state: State = "whole"
        self.port = 0
        self._to = to
        self._random = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()
        self._up.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._over.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while self.state == "cut":  # noqa: ASYNC110 (changed by another thread)
                await asyncio.sleep(0.05)
            if self.state == "refusing":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(REFUSAL)
                await writer.drain()
                writer.close()
                return
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.close()
            return
        passing = [asyncio.ensure_future(self._pass(reader, back)), asyncio.ensure_future(self._pass(there, writer))]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in passing:
                task.cancel()
            for end in (writer, back):
                with suppress(OSError, RuntimeError):
                    end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                while self.state == "cut":  # noqa: ASYNC110 (changed by another thread)
                    await asyncio.sleep(0.05)
                if self.state == "slow":
                    await asyncio.sleep(len(data) / SLOW_BYTES_PER_S)
                if self.state == "refusing" or (self.state == "lossy" and self._random.random() < LOSS):
                    return
                writer.write(data)
                await writer.drain()


@contextmanager
def link(to: int) -> Iterator[Link]:
    """Link to a port of 127.0.0.1."""
    between = Link(to)
    try:
        yield between
    finally:
        between.close()
