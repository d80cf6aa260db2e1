"""Bounds the connections to the learner's port, and the bytes sent per second.

A connection is a stranger's until a request on it has brought the secret. There are few of those: when there are too
many, the oldest makes room. A server authenticates at once, so a flood cannot keep it out. A connection on which
nothing is served is closed after a few seconds, whoever holds it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

logger = logging.getLogger(__name__)

# Bound on connections that have not brought the secret.
MAX_STRANGERS = 128

# Bound on connections that have brought the secret. A server has four, so this is far more servers than one learner
# trains with.
MAX_AUTHENTICATED = 2048

# A connection without a running request is closed after this.
IDLE_S = 5.0

# Pause after a failed accept, such as for lack of file descriptors, which nothing at this port can end.
ACCEPT_AGAIN_S = 0.2
BACKLOG = 1024


class Listener(web.Server):
    """An HTTP server that bounds its connections: strangers' and authenticated ones. For use on one event loop."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler, access_log=None, keepalive_timeout=IDLE_S, lingering_time=0)
        self._strangers: dict[asyncio.Transport, None] = {}
        self._authenticated: dict[asyncio.Transport, None] = {}
        # Those on which nothing is served, the one idle for longest first.
        self._idle: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The learner's own files (checkpoints, queue, logs) need the rest.
        self._max_authenticated = (
            MAX_AUTHENTICATED if files == resource.RLIM_INFINITY else min(MAX_AUTHENTICATED, files // 2)
        )

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._strangers) >= MAX_STRANGERS:
            self._end(next(iter(self._strangers)))
        self._strangers[transport] = None
        self._time(transport)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        transport = self._connections.get(handler)
        if transport is not None:
            self._forget(transport)
        super().connection_lost(handler, exc)

    def authenticate(self, transport: asyncio.Transport) -> bool:
        """Note that the secret came on a connection, on which a request is served until `finish`.

        Returns:
            False if there is no room for it, as every authenticated connection is busy.
        """
        if transport not in self._strangers and transport not in self._authenticated:
            return False  # it made room meanwhile
        if transport in self._strangers and len(self._authenticated) >= self._max_authenticated:
            oldest = next((other for other in self._idle if other in self._authenticated), None)
            if oldest is None:
                return False
            self._end(oldest)
        self._strangers.pop(transport, None)
        self._authenticated[transport] = None
        if (timer := self._idle.pop(transport, None)) is not None:
            timer.cancel()
        return True

    def finish(self, transport: asyncio.Transport) -> None:
        """Note that the request on a connection is answered."""
        if transport in self._authenticated:
            self._time(transport)

    def _time(self, transport: asyncio.Transport) -> None:
        self._idle[transport] = self._loop.call_later(IDLE_S, self._expire, transport)

    def _expire(self, transport: asyncio.Transport) -> None:
        if transport in self._authenticated and transport.get_write_buffer_size():
            self._time(transport)  # a slow receiver has not read the answer's end
        else:
            self._end(transport)

    def _end(self, transport: asyncio.Transport) -> None:
        self._forget(transport)
        transport.abort()

    def _forget(self, transport: asyncio.Transport) -> None:
        self._strangers.pop(transport, None)
        self._authenticated.pop(transport, None)
        if (timer := self._idle.pop(transport, None)) is not None:
            timer.cancel()


def listen(host: str, port: int) -> list[socket.socket]:
    """Open sockets that listen at every address of `host`, on one port (0: a free one). Raises OSError."""
    found: list[socket.socket] = []
    absent: OSError | None = None
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, address in dict.fromkeys((info[0], str(info[4][0])) for info in infos):
        at = found[0].getsockname()[1] if found else port
        try:
            found.append(socket.create_server((address, at), family=family, backlog=BACKLOG))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for one in found:
                    one.close()
                raise
            absent = error  # a name's IPv6 address where there is no IPv6
        else:
            found[-1].setblocking(False)
    if not found:
        raise absent or OSError("no address to listen at")
    return found


async def admit(listener: Listener, open_socket: socket.socket) -> None:
    """Accept connections until cancelled, one in each turn of the loop: a server's request must be read before the
    next hundred strangers replace its connection."""
    loop = asyncio.get_running_loop()
    logged = False
    while True:
        try:
            connection, _ = await loop.sock_accept(open_socket)
            await loop.connect_accepted_socket(listener, connection)
        except OSError as error:
            if not logged:
                logger.warning("a connection to the weights' port could not be taken: %s", error)
            logged = True
            await asyncio.sleep(ACCEPT_AGAIN_S)
        await asyncio.sleep(0)


class Throttle:
    """Bounds bytes to `bytes_per_s` (0: no bound). For use on one event loop."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0

    async def pass_on(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        if delay := self.delay(count):
            await asyncio.sleep(delay)

    def delay(self, count: int) -> float:
        """Return the seconds until `count` bytes may be sent, and count them as sent then."""
        if not self._bytes_per_s:
            return 0.0
        now = self._clock()
        starts = max(now, self._free_at)
        self._free_at = starts + count / self._bytes_per_s
        return starts - now
