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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rollout_queue
from tests.rollout_queue.page.page_data import Json, make_page

PAGE = Path(rollout_queue.__file__).parent / "page"

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}


def plotly_path() -> Path | None:
    """Return the file plotly.js of the Python package plotly; None where it is not installed."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


class PageServer:
    """Holds what the server answers.

    Attributes:
        page: PageData of the next `GET /v1/page`.
        token: The viewer's token that sign-in takes; None: no sign-in is needed.
        down: Whether every request about data is answered 503, streams too.
    """

    def __init__(self, page: Json) -> None:
        self.page = page
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
        if path == "/":
            self._file(PAGE / "index.html")
        elif path == "/page/plotly.js":
            found = plotly_path()
            self._answer(404, b"") if found is None else self._file(found)
        elif path.startswith("/page/") and (PAGE / Path(path).name).is_file():
            self._file(PAGE / Path(path).name)
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

    def _file(self, path: Path) -> None:
        self._answer(200, path.read_bytes(), TYPES[path.suffix])

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
def serving(page: Json, port: int = 0) -> Iterator[PageServer]:
    """Serve the page while the context is open."""
    state = PageServer(page)
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


def write_report(page: Json, path: Path) -> Path:
    """Write the page of a run that is over as one file, as `slipstream report` does: the files of index.html inline."""
    text = (PAGE / "index.html").read_text()
    text = text.replace(
        '<link rel="stylesheet" href="page/page.css">', f"<style>\n{(PAGE / 'page.css').read_text()}</style>"
    )
    data = json.dumps(page).replace("<", "\\u003c")
    scripts = [f'<script type="application/json" id="data">{data}</script>']
    lines = []
    for line in text.splitlines():
        if line.startswith("<script ") and 'src="page/' in line:
            name = line.split('src="page/')[1].partition('"')[0]
            source = plotly_path() if name == "plotly.js" else PAGE / name
            assert source is not None
            lines += [*scripts, f"<script>\n{source.read_text()}</script>"]
            scripts = []
        else:
            lines.append(line)
    path.write_text("\n".join(lines))
    return path


if __name__ == "__main__":
    with serving(make_page(Path(sys.argv[1]) if len(sys.argv) > 1 else None), port=8765) as shown:
        print(shown.url, flush=True)
        threading.Event().wait()
