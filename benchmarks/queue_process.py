"""Runs a real queue, or an echo of the same bodies, as a process for the benchmarks of the queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from slipstream.rollout_queue.service import listen
from tests.kit.postgres import cluster

ROOT = Path(__file__).resolve().parents[1]
SERVE = """
import sys
from slipstream.protocol.config import load
from slipstream.rollout_queue.service import serve
serve(load(sys.argv[1]))
"""

Settings = dict[str, str | int | float]
"""Values of a run file by their dotted names."""
ECHOS = ("uvicorn", "starlette")
# Answers with as many bytes as the header x-answer says: without any framework, or as a route of Starlette.
ECHO = """
import asyncio, sys, uvicorn, uvloop
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": kind + ".complete"})
            if kind.endswith("shutdown"): return
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    size = int(dict(scope["headers"]).get(b"x-answer", b"2"))
    head = [(b"content-length", b"%d" % size), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"x" * size})
async def route(request):
    await request.body()
    return Response(b"x" * int(request.headers.get("x-answer", "2")), media_type="application/json")
if sys.argv[2] == "starlette":
    app = Starlette(routes=[Route("/{path:path}", route, methods=["GET", "POST", "PUT"])])
settings = {"http": "httptools", "ws": "none", "access_log": False, "log_level": "warning", "timeout_keep_alive": 600}
config = uvicorn.Config(app, port=int(sys.argv[1]), **settings)
asyncio.Runner(loop_factory=uvloop.new_event_loop).run(uvicorn.Server(config).serve())
"""


@dataclass
class Program:
    """A queue or the echo, as a process."""

    name: str
    port: int
    process: psutil.Process
    is_queue: bool
    session: int = 0
    version: int = 0

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


def free_port() -> int:
    with listen("127.0.0.1", 0) as free:
        return int(free.getsockname()[1])


def write_run_file(folder: Path, port: int, settings: Settings, name: str = "run.toml") -> Path:
    """Write the run file of a queue at `port`, whose run directory is in `folder`.

    Args:
        settings: Besides those that every run file needs.
    """
    (folder / "task.py").touch()
    needed = {"run.dir": str(folder), "model.path": "tiny", "task.path": "task.py:task", "queue.port": port}
    path = folder / name
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in (needed | settings).items()))
    return path


def start(run_file: Path, checkout: Path = ROOT, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start the queue of a run file with the code of a checkout. `output` takes what it prints; default: stderr."""
    return start_python([SERVE, str(run_file)], run_file.parent, checkout, output)


def start_python(
    arguments: list[str], folder: Path, checkout: Path = ROOT, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start Python on a program's text and its arguments, with the packages of a checkout."""
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=folder,
        stdout=output or sys.stderr,
        stderr=output,
    )


@contextmanager
def running(child: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    """Yield a child as it is measured, and end it afterwards."""
    try:
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextmanager
def queue(
    name: str,
    checkout: Path,
    store: str,
    settings: Settings,
    prepare: Callable[[Path, Path], None] | None = None,
    port: int = 0,
) -> Iterator[Program]:
    """Run the queue of a checkout; at a free port unless one is given.

    Args:
        store: `postgresql` is a database of a cluster of its own, whose CPU is not counted.
        prepare: Called with the checkout and the folder of the run directory, before the start.
    """
    port = port or free_port()
    location = cluster().new_database() if store == "postgresql" else store
    with tempfile.TemporaryDirectory() as folder:
        run_file = write_run_file(Path(folder), port, settings | {"queue.store": location})
        if prepare is not None:
            prepare(checkout, Path(folder))
        with running(start(run_file, checkout)) as process:
            yield Program(name, port, process, is_queue=True)


@contextmanager
def echo(kind: str) -> Iterator[Program]:
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(start_python([ECHO, str(port), kind], Path(folder))) as process,
    ):
        yield Program(f"echo {kind}", port, process, is_queue=False)
