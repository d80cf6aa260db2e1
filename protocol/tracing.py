"""Traces the way of each group by OpenTelemetry, off unless `tracking.traces` names a collector.

A ticket is one trace. Trace and root span have ids that follow from those of run and ticket, so every process knows
them without a message, and they survive restarts. While it is off nothing of OpenTelemetry is imported, and a span
costs one look at `_tracer`. Spans are sent by their own thread: a collector that is away loses spans, and nothing
else.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Link, SpanContext
    from opentelemetry.trace import Span as OtelSpan

logger = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str] | None
Kind = Literal["internal", "client", "server"]

# Path of the collector's route for traces, as OTLP over HTTP has it.
_ROUTE = "/v1/traces"
# Seconds for the last spans at the end of a process.
_CLOSE_S = 5.0
# Loggers that would tell of each batch that cannot be sent.
_SENDERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
_NO_HEADERS: Mapping[str, str] = {}


class TicketTrace(NamedTuple):
    """Names the trace of a ticket."""

    run: str
    ticket: str

    @property
    def ids(self) -> tuple[int, int]:
        """The ids of the trace and of its root span, of 128 and 64 bits."""
        digest = hashlib.sha256(f"{self.run}\n{self.ticket}".encode()).digest()
        return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


class Span:
    """A span that nobody records. As a context manager it is the current one within, and ends with it."""

    is_recording = False

    def set(self, **attributes: Value) -> None:
        """Set attributes, as `slipstream.NAME`. None sets nothing."""

    def fail(self, reason: str) -> None:
        """Mark it as failed, for a reason of `slipstream.protocol.reasons`."""

    def end(self) -> None:
        """End a span that is no context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


NO_SPAN = Span()


def is_on() -> bool:
    return _tracer is not None


def span(
    name: str,
    parent: TicketTrace | Span | None = None,
    links: Iterable[TicketTrace | Span] = (),
    kind: Kind = "internal",
    **attributes: Value,
) -> Span:
    """Begin a span.

    Args:
        parent: A ticket's root, or another span; None for the current one.
        links: What it belongs to besides.
    """
    return NO_SPAN if _tracer is None else _tracer.span(name, parent, links, kind, attributes)


def record(
    name: str,
    parent: TicketTrace | Span,
    began: float,
    ended: float,
    links: Iterable[TicketTrace | Span] = (),
    failed: str | None = None,
    **attributes: Value,
) -> None:
    """Add a span that is over.

    Args:
        began, ended: Seconds since the epoch.
        failed: Reason of `slipstream.protocol.reasons`; None if it did not fail.
    """
    if _tracer is not None:
        _tracer.record(name, parent, began, ended, links, failed, attributes)


def root(trace: TicketTrace, at: float, /, **attributes: Value) -> None:
    """Add the root span of a ticket's trace, once: when the ticket is issued. `at`: seconds since the epoch."""
    if _tracer is not None:
        _tracer.root(trace, at, attributes)


def current() -> Span:
    """Return the current span, to be a parent or a link elsewhere, or to get attributes."""
    return NO_SPAN if _tracer is None else _tracer.current()


def headers() -> Mapping[str, str]:
    """Return the header of an HTTP request by which its receiver continues the current span; empty without one."""
    return _NO_HEADERS if _tracer is None else _tracer.headers()


def serving(name: str, given: Iterable[tuple[bytes, bytes]]) -> Span:
    """Begin the span of a request that is served, if its headers continue a span."""
    return NO_SPAN if _tracer is None else _tracer.serving(name, given)


@contextmanager
def sending(url: str | None, process: str, run: str, exporter: SpanExporter | None = None) -> Iterator[None]:
    """Trace within the context, and send the last spans at its end, for at most `_CLOSE_S`.

    Does nothing where no URL is given, and warns where OpenTelemetry is not installed.

    Args:
        url: URL of the collector, `tracking.traces`; None for none.
        process: queue, worker or learner.
        run: Name of the run.
        exporter: Gets the spans in place of the collector.
    """
    global _tracer
    if url is None and exporter is None:
        yield
        return
    try:
        opened = _Tracer(url or "", process, run, exporter)
    except ImportError as error:
        logger.warning(
            "tracking.traces = %s: no traces are sent, since %s is not installed: pip install 'slipstream-rl[tracing]'",
            url,
            error.name,
        )
        yield
        return
    _tracer = opened
    try:
        yield
    finally:
        _tracer = None
        opened.close()


class _Recorded(Span):
    """A span of OpenTelemetry."""

    def __init__(self, of: OtelSpan) -> None:
        self.of = of
        self.is_recording = of.is_recording()
        self._token: Any = None

    def set(self, **attributes: Value) -> None:
        self.of.set_attributes(_named(attributes))

    def fail(self, reason: str) -> None:
        from opentelemetry.trace import StatusCode

        self.of.set_status(StatusCode.ERROR, reason)
        self.set(reason=reason)

    def end(self) -> None:
        self.of.end()

    def __enter__(self) -> Self:
        from opentelemetry import context, trace

        self._token = context.attach(trace.set_span_in_context(self.of))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from opentelemetry import context

        context.detach(self._token)
        # Its type alone: the text may repeat what a policy, a tool or a task says.
        if kind is not None:
            self.fail(kind.__name__)
        self.end()


class _Ids:
    """Gives ids to new spans: random ones, or those that `given` has. User code may seed Python's own generator."""

    def __init__(self) -> None:
        self.given: ContextVar[tuple[int, int] | None] = ContextVar("given", default=None)

    def generate_trace_id(self) -> int:
        given = self.given.get()
        return secrets.randbits(128) or 1 if given is None else given[0]

    def generate_span_id(self) -> int:
        given = self.given.get()
        return secrets.randbits(64) or 1 if given is None else given[1]

    def is_trace_id_random(self) -> bool:
        return False


def _session() -> Any:
    """Return an HTTP session that reads the head of an answer alone: a body may have no end."""
    import requests

    class HeadOnly(requests.Session):
        def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
            response = super().send(request, **{**options, "stream": True})
            response.close()
            response.raw = io.BytesIO()
            return response

    return HeadOnly()


class _Tracer:
    """Makes spans and sends them. Raises `ImportError` where OpenTelemetry is not installed."""

    def __init__(self, url: str, process: str, run: str, exporter: SpanExporter | None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        host = socket.gethostname()
        resource = {"service.name": f"slipstream-{process}", "service.instance.id": f"{host}-{os.getpid()}"}
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create({**resource, "host.name": host, "slipstream.run": run}),
            shutdown_on_exit=False,
            id_generator=cast(Any, self._ids),
        )
        self._once = _Once(url)
        for name in _SENDERS:
            logging.getLogger(name).addFilter(self._once)
        endpoint = url if url.endswith(_ROUTE) else url.rstrip("/") + _ROUTE
        sender = exporter or OTLPSpanExporter(endpoint=endpoint, session=_session())
        # It holds a bounded number of spans: of a collector that hangs the others are lost.
        self._provider.add_span_processor(BatchSpanProcessor(sender))
        self._tracer = self._provider.get_tracer("slipstream")
        self._wire = TraceContextTextMapPropagator()

    def span(
        self,
        name: str,
        parent: TicketTrace | Span | None,
        links: Iterable[TicketTrace | Span],
        kind: Kind,
        attributes: Mapping[str, Value],
        context: Context | None = None,
        began: float | None = None,
    ) -> _Recorded:
        from opentelemetry.trace import SpanKind

        begun = self._tracer.start_span(
            name,
            context=self._context(parent) if context is None else context,
            kind=SpanKind[kind.upper()],
            attributes=_named(attributes),
            links=self._links(links),
            start_time=None if began is None else _nanoseconds(began),
        )
        return _Recorded(begun)

    def record(
        self,
        name: str,
        parent: TicketTrace | Span,
        began: float,
        ended: float,
        links: Iterable[TicketTrace | Span],
        failed: str | None,
        attributes: Mapping[str, Value],
    ) -> None:
        span = self.span(name, parent, links, "internal", attributes, began=began)
        if failed is not None:
            span.fail(failed)
        span.of.end(_nanoseconds(ended))

    def root(self, ticket: TicketTrace, at: float, attributes: Mapping[str, Value]) -> None:
        from opentelemetry.context import Context

        before = self._ids.given.set(ticket.ids)
        try:
            span = self.span("ticket", None, (), "internal", attributes, Context(), at)
        finally:
            self._ids.given.reset(before)
        span.of.end(_nanoseconds(at))

    def current(self) -> Span:
        from opentelemetry import trace

        found = trace.get_current_span()
        return _Recorded(found) if found.get_span_context().is_valid else NO_SPAN

    def headers(self) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        self._wire.inject(carrier)
        return carrier

    def serving(self, name: str, given: Iterable[tuple[bytes, bytes]]) -> Span:
        from opentelemetry.context import Context

        carrier = {key.decode(): value.decode("latin-1") for key, value in given if key == b"traceparent"}
        if not carrier:
            return NO_SPAN
        return self.span(name, None, (), "server", {}, self._wire.extract(carrier, Context()))

    def close(self) -> None:
        """Send the last spans, for at most `_CLOSE_S`: the SDK itself may wait longer for a collector."""
        last = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        last.start()
        last.join(_CLOSE_S)
        if not last.is_alive():  # it would tell of what is lost now
            for name in _SENDERS:
                logging.getLogger(name).removeFilter(self._once)

    def _context(self, parent: TicketTrace | Span | None) -> Context | None:
        """Return the context to begin a span in; None for the current one."""
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        if isinstance(parent, TicketTrace):
            return set_span_in_context(NonRecordingSpan(self._root_of(parent)), Context())
        return set_span_in_context(parent.of, Context()) if isinstance(parent, _Recorded) else None

    def _links(self, given: Iterable[TicketTrace | Span]) -> list[Link]:
        from opentelemetry.trace import Link

        return [
            Link(self._root_of(of) if isinstance(of, TicketTrace) else of.of.get_span_context())
            for of in given
            if isinstance(of, (TicketTrace, _Recorded))
        ]

    def _root_of(self, ticket: TicketTrace) -> SpanContext:
        """Return the root of a ticket's trace. Whether the trace is sampled follows from its id, so that every process
        decides alike."""
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanContext, TraceFlags

        trace_id, span_id = ticket.ids
        found = self._provider.sampler.should_sample(Context(), trace_id, "ticket")
        sampled = found.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        return SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


class _Once(logging.Filter):
    """Says once that traces cannot be sent, in a line of this module."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._said:
            self._said = True
            first = record.getMessage().partition("\n")[0][:300]
            logger.warning("traces for tracking.traces = %s get lost, and all else continues: %s", self._url, first)
        return False


def _named(attributes: Mapping[str, Value]) -> dict[str, Any]:
    return {f"slipstream.{name}": value for name, value in attributes.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


_tracer: _Tracer | None = None
