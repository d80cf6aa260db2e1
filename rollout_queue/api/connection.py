"""Bounds what a client can do on a connection before the application hears of it (I8).

A request's head is bounded in size and time, its body in speed and time, and a connection carries one request at a
time: what comes after one that is being answered is refused once that has its answer. What is still being sent after
the answer is read and discarded for a moment, then the connection is closed. A connection has a place in a
`ConnectionPool`; where there is none its request is refused in words.
"""

from __future__ import annotations

import asyncio
import http
import time
from collections.abc import Callable
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

_TOO_MANY_PIECES = "the body is framed in too many pieces: send larger chunks, and no trailer"

_GROUPS = access.GROUP_OF.partition("{")[0].encode()

# Two of one would be read differently here and by whatever stands before the queue.
_SINGLE_HEADERS = frozenset(
    {b"host", b"authorization", b"content-length", b"transfer-encoding", b"content-type", b"origin"}
)

_RETRY_AFTER_S = 5

# A time-out that comes later than this was slept through by the whole process: SIGSTOP, a paused machine. What the
# client sent meanwhile has not been read yet, so it gets its time again. Seconds.
_MAX_LATE_S = 1.0


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Limits of one connection. Times in seconds.

    Attributes:
        head_bytes, headers: Maximum size of a request's head, and number of its headers.
        head_s: Time-out of the head.
        body_bytes, body_s: At least so many bytes of a body must come in each interval of `body_s`.
        whole_body_s: Time-out of the whole body.
        unread_s: How long an answer may wait for a client that reads nothing of it.
        linger_s: How long the rest of an answered request is read and discarded, so that the client gets to read the
            answer before the connection is closed.
    """

    head_bytes: int = 64 * 1024
    headers: int = 100
    head_s: float = 10.0
    body_bytes: int = 128 * 1024
    body_s: float = 10.0
    whole_body_s: float = 300.0
    unread_s: float = 30.0
    linger_s: float = 5.0


class _Phase(Enum):
    HEAD = auto()
    BODY = auto()
    ANSWER = auto()
    IDLE = auto()
    LINGER = auto()


class _Refused(msgspec.Struct, frozen=True):
    status: int
    body: ErrorBody
    retry_after_s: int | None = None


class _Timer:
    """Calls back once after a time, unless it is stopped or started again."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self, after_s: float, call: Callable[[], None]) -> None:
        self.stop()
        self._due = self._loop.time() + after_s
        self._handle = self._loop.call_at(self._due, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    @property
    def slept_s(self) -> float:
        """For how many seconds the process slept before it was called back."""
        late_s = self._loop.time() - self._due
        return late_s if late_s > _MAX_LATE_S else 0.0


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol within `limits`, with a place in `pool`. Make a type for each queue with `bounded_by`."""

    pool: ConnectionPool
    histograms: Histograms
    limits = ConnectionLimits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._phase = self._timed = _Phase.IDLE
        self._body_at = 0.0
        self._put_at: float | None = None
        self._timer, self._unread_timer = _Timer(self.loop), _Timer(self.loop)
        self._received = self._body = self._body_before = self._head = self._pieces = 0
        self._refusal: _Refused | None = None
        self._refused_next: _Refused | None = None  # to be sent after the answer that is being made

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.pool.enter(self, Kind.NEW)
        self._enter(_Phase.HEAD)
        self._received = 0
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.stop()
        self._unread_timer.stop()
        self.pool.leave(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer.start(self.limits.unread_s, self._is_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_timer.stop()

    def _is_unread(self) -> None:
        if self._unread_timer.slept_s:
            self._unread_timer.start(self.limits.unread_s, self._is_unread)
        else:
            self.transport.abort()

    def drop(self) -> None:
        """Close the connection at once, since another needs its place."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.LINGER or self._refused_next is not None:
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
            self._refuse(self._refusal or _http_refusal(400, f"this is not an HTTP request: {error}"))
            return
        if self._phase is _Phase.HEAD and self._received > self.limits.head_bytes:
            text = f"the request's head has more than the {self.limits.head_bytes} bytes that are allowed"
            self._refuse(_http_refusal(431, text))
        elif self._phase is _Phase.BODY and self._received - 2 * self._body > self.limits.head_bytes:
            self._refuse(_http_refusal(400, _TOO_MANY_PIECES))
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
        names = [name for name, _ in self.headers if name in _SINGLE_HEADERS]
        if len(names) != len(set(names)):
            twice = next(name.decode() for name in names if names.count(name) > 1)
            self._fail(400, f"the request has the header {twice} twice: send it once")
        kind = kind_of(self.url)
        if not self.pool.enter(self, kind):
            self._refusal = _Refused(503, ErrorBody(reasons.BUSY, self._why_busy(kind)), _RETRY_AFTER_S)
            raise ValueError(self._refusal.body.message)
        self.pool.works(self)
        self._phase = _Phase.BODY
        self._received = self._body = self._body_before = self._pieces = 0
        put = kind is Kind.WORKER and self.url.startswith(_GROUPS) and self.parser.get_method() == b"PUT"
        self._put_at = time.perf_counter() if put else None
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
        if self._put_at is not None and not unread:
            self.histograms.put_s(time.perf_counter() - self._put_at, self._body)
        super().on_response_complete()
        if self.transport.is_closing():
            self._enter(_Phase.IDLE)
        elif self._refused_next is not None:
            self._send(self._refused_next)
        elif unread:
            self._linger()
        else:
            self._enter(_Phase.IDLE)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection even if the client has not read its whole answer by now."""
        self.transport.abort()

    def _enter(self, phase: _Phase) -> None:
        """Enter a phase in which no request is being answered."""
        self._phase = phase
        self.pool.waits(self)

    def _time(self) -> None:
        """Start the time-out of the current phase, unless it runs already."""
        if self._timed is self._phase:
            return
        self._timer.stop()
        self._timed = self._phase
        if self._phase is _Phase.HEAD:
            self._timer.start(self.limits.head_s, self._head_is_late)
        elif self._phase is _Phase.BODY:
            self._body_before = 0
            self._body_at = self.loop.time()
            self._timer.start(self.limits.body_s, self._check_speed)

    def _head_is_late(self) -> None:
        if self._timer.slept_s:
            self._timer.start(self.limits.head_s, self._head_is_late)
        elif self._received:
            self._refuse(_http_refusal(408, f"the request's head did not come within {self.limits.head_s:g} s"))
        else:
            self.transport.abort()

    def _check_speed(self) -> None:
        limits, slept_s = self.limits, self._timer.slept_s
        self._body_at += slept_s
        if self._phase is _Phase.BODY and self.loop.time() - self._body_at >= limits.whole_body_s:
            self._refuse(_http_refusal(408, f"the body did not come within {limits.whole_body_s:g} s"))
        elif slept_s or self.flow.read_paused or self._body - self._body_before >= limits.body_bytes:
            self._body_before = self._body
            self._timer.start(limits.body_s, self._check_speed)
        elif self._phase is _Phase.BODY:
            text = f"the body brought less than {limits.body_bytes} bytes within {limits.body_s:g} s"
            self._refuse(_http_refusal(408, text))

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
        self._refusal = _http_refusal(status, text)
        raise ValueError(text)

    def _why_busy(self, kind: Kind) -> str:
        again = f"try again in {_RETRY_AFTER_S} s"
        if kind is Kind.WORKER:
            return (
                f"all connections are in use that {self.pool.max_workers} workers have (queue.max_workers): {again}; "
                f"where there are more workers, raise it"
            )
        return f"all connections of the learner, servers and operators are in use: {again}, and ask less often"

    def _refuse(self, refused: _Refused) -> None:
        """Answer in place of the application. What was asked before has its answer first."""
        if (running := self.cycle) is not None and not running.response_complete:
            if self._phase is _Phase.ANSWER:
                self._refused_next = refused
                self.flow.pause_reading()
                return
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.abort()
                return
        self._send(refused)

    def _send(self, refused: _Refused) -> None:
        """Send a refusal, and close the connection once the client has had time to read it."""
        body = codec.encode_json(refused.body)
        line = f"HTTP/1.1 {refused.status} {http.HTTPStatus(refused.status).phrase}\r\n"
        later = "" if refused.retry_after_s is None else f"retry-after: {refused.retry_after_s}\r\n"
        head = f"{line}content-type: {JSON}\r\ncontent-length: {len(body)}\r\n{later}connection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        self.pool.enter(self, Kind.CLOSING)
        self._enter(_Phase.LINGER)
        self._unset_keepalive_if_required()
        self._timer.start(self.limits.linger_s, self.transport.abort)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def bounded_by(
    pool: ConnectionPool, histograms: Histograms, limits: ConnectionLimits = Connection.limits
) -> type[Connection]:
    """Return the type of one queue's connections."""
    return type("Connection", (Connection,), {"pool": pool, "histograms": histograms, "limits": limits})


def _http_refusal(status: int, text: str) -> _Refused:
    return _Refused(status, ErrorBody(reasons.http(status), text))
