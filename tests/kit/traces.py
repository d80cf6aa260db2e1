"""Collects the spans of processes, as a collector of OpenTelemetry does, and of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from slipstream.protocol import tracing


@contextmanager
def traced() -> Iterator[Callable[[], Sequence[Any]]]:
    """Trace this process. Yields a function that returns the spans, once the block is left."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    with tracing.sending(None, "test", "run", exporter):
        yield exporter.get_finished_spans


@dataclass
class Collector:
    """Holds what was sent: `sent` has path and body of each request."""

    url: str = ""
    sent: list[tuple[str, bytes]] = field(default_factory=list)

    def spans(self) -> list[tuple[dict[str, str], Any]]:
        """Return each span with the texts among its process's attributes."""
        message = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        return [
            ({each.key: each.value.string_value for each in process.resource.attributes}, span)
            for _, body in self.sent
            for process in message.ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in process.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.sent.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
