"""Loads a queue, or an echo, over plain sockets: sessions, and the life of groups from ticket to step."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.queue_process import Program
from slipstream.protocol import access, codec
from slipstream.protocol.client import JSON, MSGPACK
from slipstream.protocol.messages import (
    BeginSession,
    Fingerprint,
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

ROLLOUTS = 8
BYTES_PER_TOKEN = 9  # An int32 id, a float32 log-prob and a bool of the mask.


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


async def begin(of: Program, servers: int = 1, fingerprint: Fingerprint | None = None) -> None:
    """Begin a session, with what workers have to match, and let servers serve version 0."""
    connection = Connection(of.port)
    message = BeginSession(0, 0, 1_000_000, resume=False, fingerprint=fingerprint)
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


# Asks for each path every 20 ms until its standard input ends, and prints the seconds that each answer took.
PROBE = """
import http.client, json, select, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
seconds = {path: [] for path in sys.argv[2:]}
while not select.select([sys.stdin], [], [], 0.02)[0]:
    for path, of_path in seconds.items():
        began = time.perf_counter()
        connection.request("GET", path)
        connection.getresponse().read()
        of_path.append(time.perf_counter() - began)
print(json.dumps(seconds))
"""


@asynccontextmanager
async def probed_apart(of: Program, seconds: dict[str, list[float]]) -> AsyncIterator[None]:
    """Ask for paths from its own process, which the load does not hold up. Adds the seconds of each answer."""
    command = (sys.executable, "-c", PROBE, str(of.port), *seconds)
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        yield
    finally:
        found, _ = await child.communicate(b"")
    for path, of_path in json.loads(found).items():
        seconds[path] += of_path


@asynccontextmanager
async def viewers(of: Program, count: int) -> AsyncIterator[None]:
    """Hold so many pages open: each has read the page's data, and reads its live stream."""

    async def read(writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        try:
            while await reader.read(2**16):
                pass
        finally:
            writer.close()

    readers = []
    for _ in range(count):
        page = Connection(of.port)
        status, _ = await page.ask("GET", access.PAGE_DATA)
        assert status == 200, status
        page.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", of.port)
        writer.write(f"GET {access.LIVE} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        readers.append(asyncio.create_task(read(writer, reader)))
    try:
        yield
    finally:
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
