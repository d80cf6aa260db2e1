"""Bounds what a client can do on a connection before the application hears of it (I8).

A request's head is bounded in size and time, its body in speed and time, and a connection carries one request at a
time. What is still being sent after the answer is read and discarded for a moment, then the connection is closed. With
too many connections the one that has been idle longest is closed; the liveness probe is always answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import resource
from enum import Enum, auto
from typing import Any
from weakref import WeakKeyDictionary

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from protocol import access, codec, reasons
from protocol.client import JSON
from protocol.messages import ErrorBody

_MAX_CONNECTIONS = 4096

_SPARE_CONNECTIONS = 32  # beyond the bound: for the liveness probe

_TOO_MANY_PIECES = "the body is framed in too many pieces: send larger chunks, and no trailer"


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Limits of one connection. Times in seconds.

    Attributes:
        head_bytes, headers: Maximum size of a request's head, and number of its headers.
        head_s: Time-out of the head.
        body_bytes, body_s: At least so many bytes of a body must come in each interval of `body_s`.
        whole_body_s: Time-out of the whole body.
        linger_s: How long the rest of an answered request is read and discarded, so that the client gets to read the
            answer before the connection is closed.
    """

    head_bytes: int = 64 * 1024
    headers: int = 100
    head_s: float = 10.0
    body_bytes: int = 128 * 1024
    body_s: float = 10.0
    whole_body_s: float = 300.0
    linger_s: float = 5.0


class _Phase(Enum):
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    IDLE = auto()
    LINGER = auto()


class _Waiting:
    """One server's idle connections, oldest first; those that never made a request come before the others."""

    def __init__(self) -> None:
        self._fresh: dict[Connection, None] = {}
        self._served: dict[Connection, None] = {}

    def add(self, connection: Connection, served: bool) -> None:
        self.discard(connection)
        (self._served if served else self._fresh)[connection] = None

    def discard(self, connection: Connection) -> None:
        self._fresh.pop(connection, None)
        self._served.pop(connection, None)

    def oldest_but(self, connection: Connection) -> Connection | None:
        return next((other for kind in (self._fresh, self._served) for other in kind if other is not connection), None)


_waiting_of: WeakKeyDictionary[ServerState, _Waiting] = WeakKeyDictionary()


def max_connections() -> int:
    """Return how many connections this process may hold: at most half of its file descriptors.

    Raises the process's limit of descriptors to the hard limit first.
    """
    with contextlib.suppress(ValueError, OSError):  # a kernel may allow fewer than the hard limit says
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, files // 2)


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol within `limits`. uvicorn's `limit_concurrency` is the maximum number of connections."""

    limits = ConnectionLimits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._phase = self._timed = _Phase.IDLE
        self._waiting = _waiting_of.setdefault(self.server_state, _Waiting())
        self._served = 0
        self._body_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._received = self._body = self._body_before = self._head = self._pieces = 0
        self._refusal: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._enter(_Phase.HEAD)
        self._received = 0
        self._time()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room(self.limit_concurrency)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._waiting.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.LINGER:
            return
        self._unset_keepalive_if_required()
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEAD)
            self._received = 0
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is answered as if it had not asked for an upgrade
        except httptools.HttpParserError as error:
            status, text = self._refusal or (400, f"this is not an HTTP request: {error}")
            self._refuse(status, text)
            return
        if self._phase is _Phase.HEAD and self._received > self.limits.head_bytes:
            self._refuse(431, f"the request's head has more than the {self.limits.head_bytes} bytes that are allowed")
        elif self._phase is _Phase.BODY and self._received - 2 * self._body > self.limits.head_bytes:
            self._refuse(400, _TOO_MANY_PIECES)
        else:
            self._time()

    def on_message_begin(self) -> None:
        if self._phase is not _Phase.HEAD:
            self._fail(400, "a request came before the answer to the one before it: send one at a time")
        self._head = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not _Phase.HEAD:
            self._count_piece()
            return  # a trailer, which nothing reads
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase = _Phase.BODY
        self._waiting.discard(self)
        self._received = self._body = self._body_before = self._pieces = 0
        health = self.url.partition(b"?")[0] == access.HEALTH.encode()
        self.limit_concurrency = None if health else self.config.limit_concurrency
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._count_piece()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase is _Phase.BODY:
            self._phase = _Phase.ANSWER
        super().on_message_complete()

    def on_response_complete(self) -> None:
        unread = self._phase is _Phase.BODY
        super().on_response_complete()
        self._served += 1
        if unread and not self.transport.is_closing():
            self._linger()
        else:
            self._enter(_Phase.IDLE)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection even if the client has not read its whole answer by now."""
        self.transport.abort()

    def _enter(self, phase: _Phase) -> None:
        """Enter a phase in which no request is being answered."""
        self._phase = phase
        self._waiting.add(self, self._served > 0)

    def _time(self) -> None:
        """Start the time-out of the current phase, unless it runs already."""
        if self._timed is self._phase:
            return
        self._cancel_timer()
        self._timed = self._phase
        if self._phase is _Phase.HEAD:
            self._timer = self.loop.call_later(self.limits.head_s, self._head_is_late)
        elif self._phase is _Phase.BODY:
            self._body_before = 0
            self._body_at = self.loop.time()
            self._timer = self.loop.call_later(self.limits.body_s, self._check_speed)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._received:
            self._refuse(408, f"the request's head did not come within {self.limits.head_s:g} s")
        else:
            self.transport.abort()

    def _check_speed(self) -> None:
        if self._phase is _Phase.BODY and self.loop.time() - self._body_at >= self.limits.whole_body_s:
            self._refuse(408, f"the body did not come within {self.limits.whole_body_s:g} s")
        elif self.flow.read_paused or self._body - self._body_before >= self.limits.body_bytes:
            self._body_before = self._body
            self._timer = self.loop.call_later(self.limits.body_s, self._check_speed)
        elif self._phase is _Phase.BODY:
            self._refuse(
                408, f"the body brought less than {self.limits.body_bytes} bytes within {self.limits.body_s:g} s"
            )

    def _count_head(self, size: int) -> None:
        """Count bytes of the head while it is parsed: one piece of data may hold several times the limit."""
        self._head += size
        if self._head > self.limits.head_bytes or len(self.headers) >= self.limits.headers:
            self._fail(
                431,
                f"the request's head is too large: allowed are {self.limits.headers} headers and "
                f"{self.limits.head_bytes} bytes",
            )

    def _count_piece(self) -> None:
        """Count pieces of a body or trailer: each costs microseconds, and 64 KiB may hold ten thousand."""
        self._pieces += 1
        if self._pieces > 256 + self._body // 64:
            self._fail(400, _TOO_MANY_PIECES)

    def _fail(self, status: int, text: str) -> None:
        """Leave the parser with an error; `data_received` then refuses the request."""
        self._refusal = status, text
        raise ValueError(text)

    def _refuse(self, status: int, text: str) -> None:
        """Answer in place of the application, or break off if it has begun to answer."""
        if (running := self.cycle) is not None and not running.response_complete:
            begun = running.response_started or self._phase is _Phase.ANSWER
            running.disconnected = True
            running.message_event.set()
            if begun:
                self.transport.abort()
                return
        body = codec.encode_json(ErrorBody(reasons.http(status), text))
        line = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
        head = f"{line}content-type: {JSON}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        self._enter(_Phase.LINGER)
        self._unset_keepalive_if_required()
        self._cancel_timer()
        self._timer = self.loop.call_later(self.limits.linger_s, self.transport.abort)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _make_room(self, max_connections: int) -> None:
        """Close the connection that has been idle longest, or this one if none is idle."""
        if (oldest := self._waiting.oldest_but(self)) is not None:
            self._waiting.discard(oldest)
            self.connections.discard(oldest)
            oldest.transport.abort()
        elif len(self.connections) > max_connections + _SPARE_CONNECTIONS:
            self.connections.discard(self)
            self.transport.abort()
