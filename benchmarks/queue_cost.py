"""Measures what a group costs the rollout queue, beside a bare echo of the same bodies, and prints JSON.

    python -m benchmarks.queue_cost cycle [--stores :memory: sqlite postgresql] [--kilobytes 64] [--against CHECKOUT]
    python -m benchmarks.queue_cost scale [--scales workers ...] [--stores :memory:] [--against CHECKOUT]

`cycle`: workers draw a ticket at a time and submit its group, a learner leases
and acknowledges `--step` groups at a time: by default one, so that a group's life is four requests.
Queues and echos (uvicorn alone, and a route of Starlette, which answer as many bytes) take turns in the same rounds;
the figure is milliseconds of a server's CPU per group, and its ratio to the echo's in Starlette.
`scale`: the same cycle with more tickets in the store, workers that wait, servers, or ready groups, one at a time.

Everything runs on this machine. `healthz_p99_ms` is asked every 20 ms throughout, besides the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from protocol import access, codec
from protocol.client import JSON, MSGPACK
from protocol.messages import (
    BeginSession,
    Group,
    LeaseAck,
    LeaseReply,
    LeaseRequest,
    Rollout,
    RunPosition,
    Segment,
    Server,
    ServerChange,
    ServerState,
    Ticket,
    TicketReply,
    TicketRequest,
    VersionSpan,
)
from rollout_queue.service import listen
from tests.kit.postgres import cluster

ROOT = Path(__file__).resolve().parents[1]
ROLLOUTS = 8
RUN_NAME = "cost"
ECHOS = ("uvicorn", "starlette")
PERMITS_PER_DEPTH = 16
BYTES_PER_TOKEN = 9  # An int32 id, a float32 log-prob and a bool of the mask.
SERVE = (
    "import sys; from protocol.config import load; from rollout_queue.service import serve; serve(load(sys.argv[1]))"
)
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


def rollouts_of(kilobytes: float, server: int = 0) -> list[Rollout]:
    """Return rollouts of about `kilobytes` KiB together."""
    length = max(1, int(kilobytes * 1024) // ROLLOUTS // BYTES_PER_TOKEN)
    segment = Segment(
        np.arange(length, dtype=np.int32),
        np.ones(length, dtype=np.bool_),
        np.full(length, -0.5, dtype=np.float32),
        [VersionSpan(0, 0, length, 0)],
    )
    return [Rollout([segment], float(number % 2), "stop") for number in range(ROLLOUTS)]


class Connection:
    """One connection that carries one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, body: bytes = b"", kind: str = JSON, answer: int = 2
    ) -> tuple[int, bytes]:
        """Send a request. Returns the status and the body of the answer. An echo answers with `answer` bytes."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**26)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\nx-answer: {answer}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        top = await reader.readuntil(b"\r\n\r\n")
        status = int(top[9:12])
        at = top.lower().find(b"content-length:")
        size = int(top[at + 15 : top.index(b"\r", at)]) if at >= 0 else 0
        return status, await reader.readexactly(size) if size else b""

    async def told(self, method: str, path: str, message: Any, kind: Any) -> Any:
        status, body = await self.ask(method, path, codec.encode_json(message))
        assert status == 200, (method, path, status, body[:300])
        return codec.decode_json(body, kind)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


@dataclass
class Program:
    """A queue or the echo, as a process."""

    name: str
    port: int
    process: psutil.Process
    is_queue: bool
    session: int = 0
    version: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def program(arguments: list[str], environment: dict[str, str], folder: str) -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, *arguments], env=environment, cwd=folder, stdout=sys.stderr)
    try:
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()


def free_port() -> int:
    with listen("127.0.0.1", 0) as free:
        return int(free.getsockname()[1])


@contextmanager
def queue(name: str, checkout: Path, store: str, *, permits: int = 256, tickets: int = 0) -> Iterator[Program]:
    """Run the queue of a checkout; `permits` groups may be outstanding, `tickets` have ended before.

    `postgresql` is a database of a cluster of its own, whose CPU is not counted.
    """
    port = free_port()
    store = cluster().new_database() if store == "postgresql" else store
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").touch()
        run_file = Path(folder, "run.toml")
        run_file.write_text(
            f'[run]\ndir = "{folder}"\nname = "{RUN_NAME}"\n[model]\npath = "tiny"\n[task]\npath = "task.py:task"\n'
            f"[rollout]\ngroup_size = {ROLLOUTS}\n"
            f"[learner]\ngroups_per_step = {PERMITS_PER_DEPTH}\ntoken_budget = 262144\nsteps = 1000000\n"
            f"[vllm]\nmax_model_len = 262144\n"
            f'[queue]\nport = {port}\nstore = "{store}"\ndepth = {permits / PERMITS_PER_DEPTH}\nmax_staleness = 9999\n'
            f"ticket_timeout_s = 3600\nticket_max_age_s = 7200\ncapacity_groups = 20000\n"
            f"capacity_bytes = {8 * 2**30}\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        if tickets:
            fill_store(checkout, folder, tickets)
        with program(["-c", SERVE, str(run_file)], environment, folder) as process:
            yield Program(name, port, process, is_queue=True)


@contextmanager
def echo(kind: str) -> Iterator[Program]:
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        program(["-c", ECHO, str(port), kind], dict(os.environ), folder) as process,
    ):
        yield Program(f"echo {kind}", port, process, is_queue=False)


async def ready(of: Program) -> None:
    """Wait until a program answers."""
    for _ in range(300):
        connection = Connection(of.port)
        try:
            status, _ = await connection.ask("GET", access.READY)
            if status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{of.name} does not answer")


async def begin(of: Program, servers: int = 1) -> None:
    """Begin a session and let servers serve version 0."""
    connection = Connection(of.port)
    message = BeginSession(0, 0, 1_000_000, resume=False)
    of.session = (await connection.told("POST", access.POLICY, message, RunPosition)).session
    # vllm-0 is registered from the run file.
    known = await connection.told("GET", access.SERVERS, None, list[Server])
    for number in range(servers):
        name = f"vllm-{number}"
        url = next((server.url for server in known if server.name == name), f"http://127.0.0.1:{20_000 + number}")
        path = access.SERVER_OF.format(name=name)
        for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
            server = Server(name, url, state, 0 if state is ServerState.SERVING else None)
            await connection.told("PUT", path, ServerChange(server, of.session), Server)
    connection.close()


class Cycle:
    """The life of groups: tickets, groups, leases, steps.

    Args:
        of: The queue or the echo.
        kilobytes: Size of a group.
        sizes: Sizes of the queue's answers, which the echo repeats.
        step: Groups that the learner leases and acknowledges at a time.
        servers: Groups name one of so many servers.
    """

    def __init__(self, of: Program, kilobytes: float, sizes: dict[str, int], step: int, servers: int = 1) -> None:
        self._of = of
        self._sizes = sizes
        self._rollouts = rollouts_of(kilobytes)
        self._step = step
        self._servers = servers
        self._left = 0
        self._submitted = 0
        self._came = asyncio.Event()

    async def run(self, groups: int, workers: list[Connection], learner: Connection) -> None:
        """Take `groups` groups through the queue."""
        self._left, self._submitted = groups, 0
        async with asyncio.TaskGroup() as tasks:
            pollers = [tasks.create_task(self._work(connection, n)) for n, connection in enumerate(workers)]
            await self._learn(groups, learner)
            for poller in pollers:
                poller.cancel()
        # A poll that was cut off leaves its connection unusable.
        for n, connection in enumerate(workers):
            connection.close()
            workers[n] = Connection(self._of.port)

    async def _work(self, connection: Connection, number: int) -> None:
        name = f"worker-{number}"
        while self._left > 0:
            self._left -= 1
            request = codec.encode_json(TicketRequest(name, 1, wait_s=30.0))
            if self._of.is_queue:
                status, body = await connection.ask("POST", access.TICKETS, request)
                if status == 204:
                    self._left += 1
                    continue
                assert status == 200, (status, body[:300])
                self._sizes["tickets"] = len(body)
                ticket = codec.decode_json(body, TicketReply).tickets[0]
            else:
                await connection.ask("POST", access.TICKETS, request, answer=self._sizes["tickets"])
                ticket = Ticket("1234.0", 1234, ROLLOUTS, 0, 0, 60.0)
            await self.submit(connection, ticket, name)
            self._submitted += 1
            self._came.set()

    async def submit(self, connection: Connection, ticket: Ticket, name: str) -> None:
        server = f"vllm-{ticket.index % self._servers}"
        group = Group(ticket.id, ticket.index, 0, self._rollouts, name, [server], 0.0, 1.0)
        body = codec.encode(group)
        self._sizes["group"] = len(body)
        status, answer = await connection.ask("PUT", access.GROUP_OF.format(id=ticket.id), body, MSGPACK, 3)
        assert status in (200, 201), (status, answer[:300])

    async def _learn(self, groups: int, connection: Connection) -> None:
        of, held, taken = self._of, [], 0
        while taken < groups:
            lease = f"lease-{taken}"
            request = codec.encode_json(LeaseRequest(of.session, lease, self._step, wait_s=30.0))
            if of.is_queue:
                status, body = await connection.ask("POST", access.LEASES, request)
                assert status == 200, (status, body[:300])
                held = [codec.decode(bytes(raw), Group).ticket_id for raw in codec.decode(body, LeaseReply).groups]
                if not held:
                    continue
                self._sizes["lease"] = len(body) // len(held)
                of.version += 1
                ack = LeaseAck(of.session, held, {}, of.version, of.version)
                status, body = await connection.ask(
                    "POST", access.LEASE_ACK_OF.format(id=lease), codec.encode_json(ack)
                )
                assert status == 200, (status, body[:300])
                self._sizes["ack"] = len(body)
            else:
                wanted = min(self._step, groups - taken)
                while self._submitted - taken < wanted:
                    self._came.clear()
                    await self._came.wait()
                held = ["1234.0"] * wanted
                await connection.ask("POST", access.LEASES, request, answer=len(held) * self._sizes["lease"])
                ack = codec.encode_json(LeaseAck(of.session, held, {}, 1, 1))
                await connection.ask("POST", access.LEASE_ACK_OF.format(id=lease), ack, answer=self._sizes["ack"])
            taken += len(held)


async def probe(of: Program, seconds: list[float]) -> None:
    """Ask for /healthz every 20 ms until cancelled."""
    connection = Connection(of.port)
    try:
        while True:
            began = time.perf_counter()
            await connection.ask("GET", access.HEALTH)
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
    finally:
        connection.close()


async def rounds(
    programs: list[Program], kilobytes: float, groups: int, count: int, workers: int, step: int, servers: int = 1
) -> dict[str, Any]:
    """Let programs take turns. Returns the CPU milliseconds per group of each, and the ratios to the last, the echo."""
    sizes: dict[str, int] = {}
    cycles = {of.name: Cycle(of, kilobytes, sizes, step, servers) for of in programs}
    polling = {of.name: [Connection(of.port) for _ in range(workers)] for of in programs}
    learners = {of.name: Connection(of.port) for of in programs}
    cpu: dict[str, list[float]] = {of.name: [] for of in programs}
    wall: dict[str, list[float]] = {of.name: [] for of in programs}
    health: dict[str, list[float]] = {of.name: [] for of in programs}
    for number in range(count + 1):
        for of in programs:
            seconds: list[float] = []
            probing = asyncio.create_task(probe(of, seconds))
            before, began = of.cpu_s(), time.perf_counter()
            await cycles[of.name].run(groups if number else max(32, groups // 4), polling[of.name], learners[of.name])
            spent, took = of.cpu_s() - before, time.perf_counter() - began
            probing.cancel()
            if number:  # the first round warms up
                cpu[of.name].append(1000 * spent / groups)
                wall[of.name].append(1000 * took / groups)
                health[of.name] += seconds
    for connections in (*polling.values(), [*learners.values()]):
        for connection in connections:
            connection.close()
    last = programs[-1].name
    return {
        "group_bytes": sizes["group"],
        "cpu_ms_per_group": {name: round(statistics.median(of), 3) for name, of in cpu.items()},
        "wall_ms_per_group": {name: round(statistics.median(of), 3) for name, of in wall.items()},
        "ratio": {
            name: round(statistics.median(a / b for a, b in zip(of, cpu[last], strict=True)), 2)
            for name, of in cpu.items()
        },
        "healthz_p99_ms": {
            name: round(1000 * sorted(of)[int(0.99 * (len(of) - 1))], 1) for name, of in health.items() if of
        },
    }


async def measure_cycle(arguments: argparse.Namespace, checkouts: dict[str, Path]) -> list[dict[str, Any]]:
    found = []
    for kilobytes in arguments.kilobytes:
        with ExitStack() as stack:
            programs = [
                stack.enter_context(queue(f"{name} {store}", checkout, store))
                for store in arguments.stores
                for name, checkout in checkouts.items()
                if not (store == "postgresql" and name == "old")
            ]
            programs += [stack.enter_context(echo(kind)) for kind in ECHOS]
            for of in programs:
                await ready(of)
                if of.is_queue:
                    await begin(of)
            groups = max(64, arguments.groups * 64 // max(64, kilobytes))
            found.append(await rounds(programs, kilobytes, groups, arguments.rounds, arguments.workers, arguments.step))
    return found


# What grows in each case, from the smallest to the largest.
SCALES = {
    "workers": (1, 64, 512, 2000),
    "servers": (1, 200),
    "ready": (0, 10_000),
    "tickets": (0, 100_000, 1_000_000),
}


def fill_store(checkout: Path, folder: str, tickets: int) -> None:
    """Put tickets that have ended into the SQLite store of a run. The checkout's own code makes the file."""
    path = Path(folder, RUN_NAME, "queue.db")
    path.parent.mkdir()
    make = f"from rollout_queue.store.sqlite import SqliteStore; SqliteStore(Path({str(path)!r})).close()"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", f"from pathlib import Path; {make}"]
    subprocess.run(command, env=environment, cwd=checkout, check=True)
    names = 'id, "index", attempt, serial, worker_id, version, state, failures, reason, bytes, tokens, oldest_version'
    rows = ((f"{n}.0", n, 0, n, "w", 0, "dropped", 0, "overage", 0, 0, 0, 0, "[]") for n in range(tickets))
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany(f"INSERT INTO tickets ({names}, arrival_version, servers) VALUES ({', '.join('?' * 14)})", rows)


async def make_ready(of: Program, groups: int) -> None:
    """Let groups wait in the queue that no learner takes."""
    connection = Connection(of.port)
    cycle = Cycle(of, 1, {}, 1)
    while groups:
        request = TicketRequest("filler", min(groups, 500), wait_s=0.0)
        reply = await connection.told("POST", access.TICKETS, request, TicketReply)
        for ticket in reply.tickets:
            await cycle.submit(connection, ticket, "filler")
        groups -= len(reply.tickets)
    connection.close()


async def measure_scale(arguments: argparse.Namespace, checkouts: dict[str, Path]) -> list[dict[str, Any]]:
    """Measure the cycle of 8 KiB groups while one thing grows."""
    found = []
    for what in arguments.scales:
        for size in SCALES[what]:
            workers, servers = (size if of == what else least for of, least in (("workers", 64), ("servers", 1)))
            ready_groups, tickets = (size if of == what else 0 for of in ("ready", "tickets"))
            with ExitStack() as stack:
                programs = [
                    stack.enter_context(
                        queue(f"{name} {store}", checkout, store, permits=64 + ready_groups, tickets=tickets)
                    )
                    for store in (["sqlite"] if what == "tickets" else arguments.stores)
                    for name, checkout in checkouts.items()
                ]
                programs += [stack.enter_context(echo(kind)) for kind in ECHOS]
                for of in programs:
                    await ready(of)
                    if of.is_queue:
                        await begin(of, servers)
                        await make_ready(of, ready_groups)
                figures = await rounds(programs, 8, arguments.groups, arguments.rounds, workers, 16, servers)
            found.append({what: size, **figures})
            print(json.dumps(found[-1]), file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cycle", "scale"])
    stores = (":memory:", "sqlite", "postgresql")
    parser.add_argument("--stores", nargs="+", default=stores, choices=stores)
    parser.add_argument("--scales", nargs="+", default=[*SCALES], choices=[*SCALES])
    parser.add_argument("--kilobytes", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--against", type=Path, help="an older checkout, measured in the same rounds")
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--step", type=int, default=1, help="groups that are leased and acknowledged at a time")
    arguments = parser.parse_args()
    checkouts = {"new": ROOT, **({"old": arguments.against.resolve()} if arguments.against else {})}
    measure = measure_cycle if arguments.what == "cycle" else measure_scale
    print(json.dumps(asyncio.run(measure(arguments, checkouts)), indent=2))


if __name__ == "__main__":
    main()
