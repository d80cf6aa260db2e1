"""Uploads by huggingface_hub itself, against a server that speaks as the hub does: what hangs ends with the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.kit.hub import model_of

# Ends as a learner does: it waits for the upload, and returns.
LEARNER = """
import sys
from pathlib import Path
from slipstream.learner.checkpoints.uploads import Uploads
from tests.kit.hub import config_in
def say(text): print(text, flush=True)
uploads = Uploads(config_in(Path(sys.argv[1])), say, say)
uploads.push(Path(sys.argv[2]), 1)
sys.stdin.readline()
uploads.wait(float(sys.argv[3]))
"""


class Hub(NamedTuple):
    url: str
    asked_for: list[str]
    putting: threading.Event
    end: threading.Event


@pytest.fixture(params=["hangs", "answers"])
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    """One that takes a commit, and that `hangs` in the upload of a file or not."""
    asked_for: list[str] = []
    putting, end = threading.Event(), threading.Event()
    hangs = request.param == "hangs"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def answer(self, found: Any) -> None:
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            putting.set()
            if hangs:
                end.wait(300)
                self.close_connection = True
                return
            self.answer({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked_for.append(self.path)
            url = f"http://127.0.0.1:{server.server_port}"
            if "repos/create" in self.path:
                return self.answer({"url": f"{url}/me/sums", "name": "me/sums", "id": "me/sums"})
            if "preupload" in self.path:
                files = [
                    {"path": of["path"], "uploadMode": "lfs", "shouldIgnore": False} for of in json.loads(body)["files"]
                ]
                return self.answer({"files": files, "commitOid": None})
            if "objects/batch" in self.path:
                objects = [
                    {**of, "actions": {"upload": {"href": f"{url}/put/{of['oid']}"}}}
                    for of in json.loads(body)["objects"]
                ]
                return self.answer({"transfer": "basic", "objects": objects})
            if "commit" in self.path:
                return self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/me/sums/commit/0"})
            return self.answer({})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", asked_for, putting, end)
    end.set()
    server.shutdown()
    server.server_close()


@contextmanager
def started(hub: Hub, folder: Path, wait_s: float) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_x",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "hf"),
    }
    model = model_of(folder, 1)
    (model / "more").write_bytes(b"huggingface_hub sends several files on threads")
    command = [sys.executable, "-c", LEARNER, str(folder), str(model), str(wait_s)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("hub", ["answers"], indirect=True)
def test_a_model_arrives(hub: Hub, tmp_path: Path) -> None:
    with started(hub, tmp_path, 60) as process:
        told, _ = process.communicate("\n", timeout=90)
    assert told == "the model of step 1 is on the hub: me/sums\n"
    assert any("commit/main" in path for path in hub.asked_for)


@pytest.mark.parametrize("hub", ["hangs"], indirect=True)
def test_a_learner_ends_though_the_hub_never_answers(hub: Hub, tmp_path: Path) -> None:
    with started(hub, tmp_path, 0.5) as process:
        assert hub.putting.wait(90), "the upload never came as far as the hub's silence"
        told, _ = process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert told.startswith("the upload to the hub did not end within hub.hub_timeout_s = 0.5 s")
    assert told.count("\n") == 1


@pytest.mark.parametrize("hub", ["hangs"], indirect=True)
def test_an_upload_ends_with_a_learner_that_is_killed(hub: Hub, tmp_path: Path) -> None:
    with started(hub, tmp_path, 300) as process:
        assert hub.putting.wait(90)
        children = psutil.Process(process.pid).children(recursive=True)
    assert children
    _, left = psutil.wait_procs(children, 30)
    assert not left
