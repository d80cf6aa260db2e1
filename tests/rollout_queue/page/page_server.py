"""Serves the page's files, PageData and a stream of events on 127.0.0.1, as the queue does, under the test's control.

`python -m tests.rollout_queue.page.page_server RUN_DIR` serves a run, to look at.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from slipstream.deploy.commands.report import as_one_file
from slipstream.protocol.history import PageData
from slipstream.rollout_queue import page
from tests.rollout_queue.page.page_data import Json, make_page

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


class PageServer:
    """Holds what the server answers.

    Attributes:
        page: PageData of the next `GET /v1/page`.
        token: The viewer's token that sign-in takes; None: no sign-in is needed.
        down: Whether every request about data is answered 503, streams too.
    """

    def __init__(self, data: Json) -> None:
        self.page = data
        self.token: str | None = None
        self.down = False
        self.opened = threading.Semaphore(0)
        self._streams: list[queue.SimpleQueue[tuple[str, str] | None]] = []
        self._lock = threading.Lock()
        self.url = ""

    def push(self, event: str, value: Any) -> None:
        """Send an event to every open stream."""
        self.push_text(event, json.dumps(value))

    def push_text(self, event: str, text: str) -> None:
        with self._lock:
            for stream in self._streams:
                stream.put((event, text))

    def break_streams(self) -> None:
        """End every open stream."""
        with self._lock:
            for stream in self._streams:
                stream.put(None)

    def streams(self) -> int:
        with self._lock:
            return len(self._streams)

    @contextmanager
    def stream(self) -> Iterator[queue.SimpleQueue[tuple[str, str] | None]]:
        events: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        with self._lock:
            self._streams.append(events)
        try:
            yield events
        finally:
            with self._lock:
                self._streams.remove(events)


class _Handler(BaseHTTPRequestHandler):
    server_state: PageServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/" or path.removeprefix("/page/") in page.files():
            name = page.INDEX if path == "/" else path.removeprefix("/page/")
            self._answer(200, page.files()[name], page.TYPES[f".{name.rpartition('.')[2]}"])
        elif path not in ("/v1/page", "/v1/live"):
            self._answer(404, b"")
        elif self.server_state.down:
            self._answer(503, b"{}")
        elif self.server_state.token is not None and "viewer=yes" not in self.headers.get("cookie", ""):
            self._answer(401, b"{}")
        elif path == "/v1/page":
            self._answer(200, json.dumps(self.server_state.page).encode(), "application/json")
        else:
            self._live()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/sign-in" and body.get("token") == self.server_state.token:
            self._answer(204, b"", cookie="viewer=yes; HttpOnly; SameSite=Strict; Path=/")
        else:
            refusal = {"reason": "access_denied", "message": "This is no viewer's token of this run."}
            self._answer(401, json.dumps(refusal).encode(), "application/json")

    def _answer(self, code: int, body: bytes, kind: str = "text/plain", cookie: str | None = None) -> None:
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-security-policy", CSP)
        if cookie is not None:
            self.send_header("set-cookie", cookie)
        self.end_headers()
        self.wfile.write(body)

    def _live(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("cache-control", "no-store")
        self.end_headers()
        self.wfile.flush()
        with self.server_state.stream() as events:
            self.server_state.opened.release()
            while (event := events.get()) is not None:
                try:
                    self.wfile.write(f"event: {event[0]}\ndata: {event[1]}\n\n".encode())
                    self.wfile.flush()
                except OSError:
                    return

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(data: Json, port: int = 0) -> Iterator[PageServer]:
    """Serve the page while the context is open."""
    state = PageServer(data)
    handler = type("Handler", (_Handler,), {"server_state": state})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.break_streams()
        server.shutdown()
        server.server_close()
        thread.join()


def write_report(data: Json, path: Path) -> Path:
    """Write the page of a run that is over as one file."""
    path.write_text(as_one_file(msgspec.convert(data, PageData)))
    return path


if __name__ == "__main__":
    with serving(make_page(Path(sys.argv[1]) if len(sys.argv) > 1 else None), port=8765) as shown:
        print(shown.url, flush=True)
        threading.Event().wait()
