"""Traces are off by default, alike in every process, and harm nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from slipstream.protocol import tracing
from slipstream.protocol.tracing import NO_SPAN, TicketTrace
from tests.kit.ports import free_port
from tests.kit.traces import collecting

otel = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TICKETS = [TicketTrace("run-1", f"{index}.0") for index in range(64)]


def test_off_there_is_one_span_for_all_and_nothing_is_imported() -> None:
    code = """
import sys
from slipstream.protocol import tracing
with tracing.sending(None, "worker", "run"), tracing.span("group", tracing.TicketTrace("run", "0.0"), row=1) as span:
    assert span is tracing.NO_SPAN is tracing.current() is tracing.serving("PUT", [(b"traceparent", b"00-1-1-01")])
    assert tracing.headers() == {} and not tracing.is_on() and not span.is_recording
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_ids_of_a_trace_follow_from_those_of_run_and_ticket() -> None:
    """They stand in traces that are kept: another release must not choose others."""
    assert TicketTrace("run-1", "0.0").ids == (0xF7AD0CB54498C7EB7EA117B15868B0A6, 0xB35281D6D7D84500)
    assert len({of.ids for of in [*TICKETS, TicketTrace("run-2", "0.0"), TicketTrace("run-10.", "0")]}) == 66


def test_a_span_continues_the_one_whose_header_was_sent() -> None:
    exporter = otel.InMemorySpanExporter()
    with tracing.sending(None, "queue", "run", exporter):
        assert tracing.headers() == {}, "no span is open"
        with tracing.span("submit", TICKETS[0]):
            sent = [(name.encode(), value.encode()) for name, value in tracing.headers().items()]
        with tracing.serving("PUT", sent), tracing.span("within"):
            pass
        with tracing.serving("PUT", [(b"traceparent", b"nonsense")]):
            pass
    spans = {span.name: span for span in exporter.get_finished_spans() if span.name != "PUT" or span.parent}
    assert spans["PUT"].parent.span_id == spans["submit"].context.span_id
    assert spans["within"].parent.span_id == spans["PUT"].context.span_id
    assert {span.context.trace_id for span in spans.values()} == {TICKETS[0].ids[0]}
    assert spans["submit"].resource.attributes["service.name"] == "slipstream-queue"


def test_an_error_ends_its_span_with_its_type_alone() -> None:
    exporter = otel.InMemorySpanExporter()
    with (
        tracing.sending(None, "worker", "run", exporter),
        pytest.raises(ValueError, match="a word"),
        tracing.span("reward"),
    ):
        raise ValueError("a word of the task")
    (span,) = exporter.get_finished_spans()
    assert span.status.description == "ValueError"
    assert "a word" not in span.to_json()


def sampled(process: str) -> set[TicketTrace]:
    """The tickets of which a process sends a span."""
    exporter = otel.InMemorySpanExporter()
    with tracing.sending(None, process, "run", exporter):
        for ticket in TICKETS:
            if process == "queue":
                tracing.root(ticket, 1.0)
            else:
                tracing.record("feed", ticket, 1.0, 2.0)
    found = {span.context.trace_id for span in exporter.get_finished_spans()}
    return {ticket for ticket in TICKETS if ticket.ids[0] in found}


@pytest.mark.parametrize("sampler", ["traceidratio", "parentbased_traceidratio"])
def test_a_sampler_takes_the_same_tickets_in_every_process(monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    assert sampled("queue") == sampled("learner")
    assert 0 < len(sampled("queue")) < len(TICKETS)


@pytest.mark.parametrize("route", ["", "/v1/traces"])
def test_a_collector_gets_the_spans(route: str) -> None:
    with collecting() as collector:
        with tracing.sending(collector.url + route, "worker", "night"):
            tracing.record("feed", TICKETS[0], 1.0, 2.5, failed="overage", tokens=7, lease=None, servers=["a", "b"])
        ((process, span),) = collector.spans()
    assert [path for path, _ in collector.sent] == ["/v1/traces"]
    assert (process["service.name"], process["slipstream.run"]) == ("slipstream-worker", "night")
    assert int.from_bytes(span.trace_id, "big") == TICKETS[0].ids[0]
    assert (span.end_time_unix_nano - span.start_time_unix_nano, span.status.message) == (1_500_000_000, "overage")
    assert {each.key for each in span.attributes} == {f"slipstream.{name}" for name in ("tokens", "servers", "reason")}


def test_a_collector_that_is_away_is_told_of_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.5)
    url = f"http://127.0.0.1:{free_port()}"
    with caplog.at_level(logging.INFO), tracing.sending(url, "worker", "run"):
        for ticket in TICKETS:
            with tracing.span("group", ticket):
                pass
    (line,) = caplog.messages
    assert line.startswith(f"traces for tracking.traces = {url} get lost, and all else continues: ")
    assert not tracing.is_on()


def test_an_answer_without_an_end_is_not_read() -> None:
    """A collector that floods would else fill the memory of every process."""
    sent, broken = [], threading.Event()

    class Flood(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            try:
                while sum(sent) < 10**9:
                    sent.append(self.wfile.write(bytes(2**16)))
            except OSError:
                broken.set()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Flood) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tracing.sending(f"http://127.0.0.1:{server.server_port}", "worker", "run"):
            tracing.record("feed", TICKETS[0], 1.0, 2.5)
        assert broken.wait(60.0), sum(sent)
        server.shutdown()
    assert sum(sent) < 10**8, "what the sockets hold"


def test_without_the_packages_a_run_goes_on_and_the_remedy_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with tracing.sending("http://127.0.0.1:1", "worker", "run"):
        assert tracing.span("group", TICKETS[0]) is NO_SPAN
    (line,) = caplog.messages
    assert line.endswith("is not installed: pip install 'slipstream-rl[tracing]'")
