"""Bounds what a client can do on a connection before the application hears of it (I8).

A request's head is bounded in size and time, its body in speed, and a connection carries one request at a time: what
comes after one that is being answered is discarded, and the connection closed after the answer. What is still being
sent after an early answer is read and discarded for a moment, so that the client gets to read it. A connection has a
place in a `ConnectionPool`; where there is none its request is refused in words.

`pyproject.toml` bounds uvicorn's version, because its protocol class promises no compatibility.
"""

from __future__ import annotations

import asyncio
import http
import time
from enum import Enum, auto
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import JSON
from slipstream.protocol.messages import ErrorBody
from slipstream.rollout_queue.api.connection_pool import ConnectionPool, Kind, kind_of
from slipstream.rollout_queue.observe.prometheus import Histograms

_GROUPS = access.GROUP_OF.partition("{")[0].encode()

# Two of one would be read differently here and by whatever stands before the queue.
_SINGLE_HEADERS = frozenset(
    {b"host", b"authorization", b"content-length", b"transfer-encoding", b"content-type", b"origin"}
)

_RETRY_AFTER_S = 5


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Limits of one connection. Times in seconds.

    Attributes:
        head_bytes, headers: Maximum size of a request's head, and number of its headers.
        head_s: Time-out of the head.
        body_bytes, body_s: At least so many bytes of a body must come in each interval of `body_s`.
        unread_s: How long an answer may wait for a client that reads nothing of it.
        linger_s: How long the rest of an answered request is read and discarded.
    """

    head_bytes: int = 64 * 1024
    headers: int = 100
    head_s: float = 10.0
    body_bytes: int = 128 * 1024
    body_s: float = 10.0
    unread_s: float = 30.0
    linger_s: float = 5.0


class _Phase(Enum):
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    IDLE = auto()
    LINGER = auto()


class _Refused(Exception):
    """The request is answered here, with this status and body."""

    def __init__(self, status: int, text: str, reason: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.body = ErrorBody(reason or reasons.http(status), text)
        self.retry_after_s = retry_after_s


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol within `limits`, with a place in `pool`. Make a type for each queue with `bounded_by`."""

    pool: ConnectionPool
    histograms: Histograms
    limits = ConnectionLimits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._phase = _Phase.IDLE
        self._put_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the current phase
        self._unread_timer: asyncio.TimerHandle | None = None
        self._received = self._body = self._body_before = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.pool.enter(self, Kind.NEW)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        self.pool.leave(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.limits.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def drop(self) -> None:
        """Close the connection at once, since another needs its place."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.LINGER or (self._phase is _Phase.ANSWER and not self.cycle.keep_alive):
            return
        self._unset_keepalive_if_required()
        if self._phase is _Phase.IDLE:
            self._await_head()
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is answered as if it had not asked for an upgrade
        except httptools.HttpParserError as error:
            known = error.__context__
            self._refuse(
                known if isinstance(known, _Refused) else _Refused(400, f"this is not an HTTP request: {error}")
            )
            return
        if self._phase is _Phase.HEAD and self._received > self.limits.head_bytes:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        if self._phase is not _Phase.HEAD:
            raise _Refused(400, "a request came before the answer to the one before it: send one at a time")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.HEAD:  # else it is a trailer, which nothing reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.limits.head_bytes or len(self.headers) > self.limits.headers:
            raise self._too_large()
        names = [name for name, _ in self.headers if name in _SINGLE_HEADERS]
        if len(names) != len(set(names)):
            twice = next(name.decode() for name in names if names.count(name) > 1)
            raise _Refused(400, f"the request has the header {twice} twice: send it once")
        kind = kind_of(self.url)
        if not self.pool.enter(self, kind):
            raise self._busy(kind)
        self.pool.works(self)
        self._body = self._body_before = 0
        self._enter(_Phase.BODY, self.limits.body_s)
        put = kind is Kind.WORKER and self.url.startswith(_GROUPS) and self.parser.get_method() == b"PUT"
        self._put_at = time.perf_counter() if put else None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase is _Phase.BODY:
            self._enter(_Phase.ANSWER)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        unread = self._phase is _Phase.BODY
        if self._put_at is not None and not unread:
            self.histograms.put_s(time.perf_counter() - self._put_at, self._body)
        super().on_response_complete()
        if unread and not self.transport.is_closing():
            self._linger()
        else:
            self._enter(_Phase.IDLE)
            self.pool.waits(self)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection even if the client has not read its whole answer by now."""
        self.transport.abort()

    def _enter(self, phase: _Phase, within_s: float | None = None) -> None:
        """Enter a phase, which may take `within_s` seconds."""
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if within_s is None else self.loop.call_later(within_s, self._is_late)

    def _await_head(self) -> None:
        self._received = 0
        self._enter(_Phase.HEAD, self.limits.head_s)
        self.pool.waits(self)

    def _is_late(self) -> None:
        limits = self.limits
        if self._phase is _Phase.HEAD and self._received:
            self._refuse(_Refused(408, f"the request's head did not come within {limits.head_s:g} s"))
        elif self._phase is not _Phase.BODY:
            self.transport.abort()
        elif self.flow.read_paused or self._body - self._body_before >= limits.body_bytes:
            self._body_before = self._body
            self._enter(_Phase.BODY, limits.body_s)
        else:
            text = f"the body brought less than {limits.body_bytes} bytes within {limits.body_s:g} s"
            self._refuse(_Refused(408, text))

    def _too_large(self) -> _Refused:
        return _Refused(
            431,
            f"the request's head is too large: allowed are {self.limits.headers} headers and "
            f"{self.limits.head_bytes} bytes",
        )

    def _busy(self, kind: Kind) -> _Refused:
        again = f"try again in {_RETRY_AFTER_S} s"
        text = f"all connections of the learner, servers and operators are in use: {again}, and ask less often"
        if kind is Kind.WORKER:
            text = (
                f"all connections are in use that {self.pool.max_workers} workers have (queue.max_workers): {again}; "
                f"where there are more workers, raise it"
            )
        return _Refused(503, text, reasons.BUSY, _RETRY_AFTER_S)

    def _refuse(self, refused: _Refused) -> None:
        """Answer in place of the application, and close the connection once the client has had time to read it."""
        if (running := self.cycle) is not None and not running.response_complete:
            if self._phase is _Phase.ANSWER:
                running.keep_alive = False  # its answer is the last one
                return
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.abort()
                return
        body = codec.encode_json(refused.body)
        line = f"HTTP/1.1 {refused.status} {http.HTTPStatus(refused.status).phrase}\r\n"
        later = "" if refused.retry_after_s is None else f"retry-after: {refused.retry_after_s}\r\n"
        head = f"{line}content-type: {JSON}\r\ncontent-length: {len(body)}\r\n{later}connection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        self.pool.enter(self, Kind.CLOSING)
        self.pool.waits(self)
        self._unset_keepalive_if_required()
        self._enter(_Phase.LINGER, self.limits.linger_s)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def bounded_by(
    pool: ConnectionPool, histograms: Histograms, limits: ConnectionLimits = Connection.limits
) -> type[Connection]:
    """Return the type of one queue's connections."""
    return type("Connection", (Connection,), {"pool": pool, "histograms": histograms, "limits": limits})
