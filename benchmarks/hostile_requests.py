"""Attacks a real queue process over its sockets, next to a probe of its liveness, and prints the results as JSON.

    python -m benchmarks.hostile_requests [--requests 1400] [--port 0] [--token]

by_status: Number of answers by HTTP status. `closed` counts connections that the queue ended without one.
hangs: Number of requests that the queue neither answered nor ended in time.
healthz_ms: Milliseconds of the slowest probe, each on a new connection. The value before the attack shows how busy the
    machine is with other work.
rss_mb: Resident memory before and after, MB.

Exits with 1 if there is a 500, a hang, a probe above 100 ms or growth above 50 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from benchmarks.queue_process import ROOT, Program, Settings, queue
from slipstream.protocol import access, codec
from slipstream.protocol.client import JSON, MSGPACK, QueueClient
from slipstream.protocol.messages import BeginSession, Server, ServerState, TicketRequest

TOKEN = "secret"
HANG_S = 30.0
SLOWEST_MS = 100.0
GROWTH_MB = 50.0
MIB = 1024**2
ROUTES = [
    ("POST", access.TICKETS),
    ("POST", "/v1/tickets/0.0/fail"),
    ("POST", "/v1/workers/w"),
    ("PUT", "/v1/groups/0.0"),
    ("POST", access.LEASES),
    ("POST", "/v1/leases/l/ack"),
    ("POST", "/v1/leases/l/renew"),
    ("POST", "/v1/leases/l/release"),
    ("POST", access.POLICY),
    ("PUT", "/v1/servers/vllm-9"),
    ("POST", access.FINISH),
    ("GET", access.STATUS),
]
# Messages that are valid until an attack replaces one value.
CONTROL = [
    {"worker_id": "w", "max_tickets": 1, "wait_s": 0, "have": []},
    {"worker_id": "w", "reason": "r", "detail": "d"},
    {"worker_id": "w", "ticket_ids": [], "failures": {"a": 1}, "capacity": 1, "waited_s": 0.5},
    {"session": 1, "lease_id": "l", "max_groups": 1, "wait_s": 0, "have": []},
    {"session": 1, "trained": [], "dropped": {}},
    {"session": 1},
    {"do": "begin", "step": 0, "version": 0, "total_steps": 9, "resume": True},
    {"do": "checkpointed", "session": 1, "step": 0},
    {"do": "waiting", "session": 1, "what": "groups"},
    {"server": {"name": "vllm-9", "url": "http://127.0.0.1:1"}, "session": 1},
    {"name": "vllm-9", "url": "http://127.0.0.1:1"},
]
VALUES: list[object] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -0.5, "", "\0", "a" * 300, "ä" * 100_000,
    "\U0001f600", [], [[]], [None] * 1000, {}, {"a": {}}, {"a" * 1000: 1}, {str(i): i for i in range(5000)},
]  # fmt: skip

Request = tuple[bytes, ...]
"""The pieces in which it is sent, with a pause between them."""


class Attack:
    """Makes requests from one seed, each kind in turn."""

    def __init__(self, token: str | None) -> None:
        self._random = random.Random(0)
        self._authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        self.kinds: list[Callable[[], Request]] = [
            self.wrong_value,
            self.wrong_value,
            self.raw_json,
            self.raw_msgpack,
            self.truncated,
            self.wrong_length,
            self.unknown_route,
            self.wrong_method,
            self.huge_name,
            self.chunked,
            self.trickle,
            self.half_open,
            self.no_http,
            self.odd_headers,
            self.huge_head,
            self.pipelined,
            self.web_page,
            self.hostile_path,
        ]

    def http(self, method: str, path: str, body: bytes = b"", headers: str = "", kind: str = JSON) -> bytes:
        length = "" if "ength:" in headers or "chunked" in headers else f"Content-Length: {len(body)}\r\n"
        kind = "" if "Content-Type" in headers else f"Content-Type: {kind}\r\n"
        host = "" if "Host:" in headers else "Host: localhost\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{host}{kind}{self._authorization}{length}{headers}\r\n"
        return head.encode("utf-8", "surrogateescape") + body

    def wrong_value(self) -> Request:
        method, path = self._random.choice(ROUTES)
        message = dict(self._random.choice(CONTROL))
        field = self._random.choice(list(message))
        message[field] = self._random.choice(VALUES)
        return (self.http(method, path, json.dumps(message).encode()),)

    def raw_json(self) -> Request:
        method, path = self._random.choice(ROUTES)
        body = self._random.choice(
            [
                b"", b"[", b"{}", b"null", b"[" * 200_000, b'{"a":' * 50_000, b"[" + b"{}," * 20_000 + b"{}]",
                b'{"worker_id": "\xff\xfe", "max_tickets": 1}', b'{"worker_id": "\\ud800", "max_tickets": 1}',
                b'{"worker_id": "\\ud800", "ticket_ids": ["\\udfff"]}', b"9" * 60_000, b'{"session": 1e999999}',
                b'{"do": "explode"}', b'{"session": NaN}', b"\xef\xbb\xbf{}", b" " * MIB,
            ]
        )  # fmt: skip
        return (self.http(method, path, body),)

    def raw_msgpack(self) -> Request:
        key = b"\x81\xa8rollouts"
        body = self._random.choice(
            [
                b"\xc1", key + b"\xdd\xff\xff\xff\xff", key + b"\x91" * 60_000,
                b"\x82\xa8rollouts\x90\xa1x" + b"\x91" * 60_000 + b"\xc0",
                key + b"\x91\x81\xa8segments\x91\x81\xa9token_ids\xdd" + struct.pack(">I", 4 * MIB) + b"\x90" * 4 * MIB,
                key + b"\xdd" + struct.pack(">I", MIB) + b"\x80" * MIB, self._random.randbytes(5000),
                codec.encode({"schema_version": 2**63}), codec.encode({"schema_version": "x" * MIB}),
                codec.encode({"ticket_id": "0.0", "index": 2**64 - 1, "epoch": -(2**63)}),
            ]
        )  # fmt: skip
        return (self.http("PUT", f"/v1/groups/{self._random.randrange(4)}.0", body, kind=MSGPACK),)

    def truncated(self) -> Request:
        whole = self.http(*self._random.choice(ROUTES), json.dumps(self._random.choice(CONTROL)).encode())
        return (whole[: self._random.randrange(1, len(whole))], b"")

    def wrong_length(self) -> Request:
        value = self._random.choice(
            ["0", "1", "-1", "99999999999999999999", "abc", "5\r\nContent-Length: 6", "1e3", ""]
        )
        return (self.http("POST", access.TICKETS, b'{"worker_id": "w"}', f"Content-Length: {value}\r\n"),)

    def unknown_route(self) -> Request:
        return (self.http("GET", "/" + "".join(self._random.choices("abc/.%2e?#;", k=30))),)

    def wrong_method(self) -> Request:
        method = self._random.choice(["DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "CONNECT", "BREW", "PURGE"])
        return (self.http(method, self._random.choice(ROUTES)[1]),)

    def huge_name(self) -> Request:
        name = "n" * self._random.choice([300, 60_000, 20 * MIB])
        server = {"name": name, "url": "http://127.0.0.1:1"}
        body = json.dumps(self._random.choice([server, {"server": server}, {"worker_id": name, "max_tickets": 1}]))
        return (self.http("PUT", "/v1/servers/" + name[:1000], body.encode()),)

    def chunked(self) -> Request:
        head = self.http("POST", access.TICKETS, headers="Transfer-Encoding: chunked\r\n")
        frames = [
            b"1\r\na\r\n" * 20_000, b"zz\r\n", b"ffffffffffffffffff\r\n", b"1;" + b"x" * MIB, b"2\r\n{}\r\n0\r\n\r\n",
            b"2\r\n{}\r\n0\r\nX: " + b"t" * MIB, b"-1\r\n",
        ]  # fmt: skip
        return (head + self._random.choice(frames),)

    def trickle(self) -> Request:
        head = self.http("POST", access.TICKETS, headers="Transfer-Encoding: chunked\r\n")
        return (head, *[b"1\r\n \r\n"] * 10)

    def half_open(self) -> Request:
        return (self._random.choice([b"", b"G", b"POST /v1/tickets HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: y"]), b"")

    def no_http(self) -> Request:
        return (
            self._random.choice([b"\x16\x03\x01\x02\x00", self._random.randbytes(2000), b"\r\n" * 5000, b"\0" * 99]),
        )

    def odd_headers(self) -> Request:
        lines = self._random.choice(
            [
                "Host: \r\n", "Host: [::1\r\n", "Host: a b\r\n", "Host: \udcff\r\n",
                "Upgrade: websocket\r\nConnection: Upgrade\r\n",
                "Expect: 100-continue\r\n", "Connection: close\r\n", "Content-Type: \udcff\r\n", "X: y\r\n" * 90,
                "Authorization: \udcff\r\n", "Origin: \udcff\r\n", "Transfer-Encoding: gzip, chunked\r\n", "X y: z\r\n",
            ]
        )  # fmt: skip
        return (self.http("POST", access.TICKETS, b"{}", lines),)

    def huge_head(self) -> Request:
        size = self._random.choice([70_000, MIB, 8 * MIB])
        return (self._random.choice([b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"]) + b"a" * size,)

    def pipelined(self) -> Request:
        return (self.http("GET", access.STATUS) * 500,)

    def web_page(self) -> Request:
        lines = self._random.choice(
            ["Host: evil.example\r\n", "Origin: http://evil.example\r\n", "Content-Type: text/plain\r\n"]
        )
        return (self.http("POST", access.FINISH, b'{"session": 1}', lines),)

    def hostile_path(self) -> Request:
        method, path = self._random.choice(
            [
                ("GET", "/v1/rollouts?limit=" + "9" * 500), ("GET", "/v1/rollouts?step=-1&worst=%ff"),
                ("POST", "/v1/workers/%00"), ("POST", "/v1/workers/" + "%ff" * 500), ("PUT", "/v1/servers/..%2f.."),
                ("PUT", "/v1/groups/" + "9" * 5000 + ".0"), ("PUT", "/v1/groups/%f0%9f%98%80"),
                ("PUT", "/v1/groups/\udcff"),
                ("POST", "/v1/leases/%0d%0aX:/renew"), ("GET", "http://evil.example/v1/status"), ("OPTIONS", "*"),
            ]
        )  # fmt: skip
        return (self.http(method, path, b"{}"),)


async def send(port: int, request: Request) -> str:
    """Send a request and return the status of the answer, `closed` or `hang`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(HANG_S):
            with suppress(ConnectionError):
                for piece in request:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02 if len(request) > 1 else 0)
                if request[-1] == b"":
                    writer.write_eof()
            line = b""
            with suppress(ConnectionError):
                line = await reader.readline()
            return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"
    except TimeoutError:
        return "hang"
    finally:
        writer.transport.abort()


def probe(port: int, stop: Connection) -> None:
    """Ask for liveness until told to stop, on a new connection each time, then send the milliseconds of each."""
    samples: list[float] = []
    stop.send("ready")
    while not stop.poll(0.02):
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = connection.recv(100)
        samples.append(1000 * (time.perf_counter() - started))
        assert answer.startswith(b"HTTP/1.1 200 "), answer
    stop.send(samples)


@contextmanager
def probing(port: int, samples: list[float]) -> Iterator[None]:
    """Run the probe in a separate process, so that the attacker's own work does not count."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=probe, args=(port, there), daemon=True)
    process.start()
    there.close()
    here.recv()
    try:
        yield
    finally:
        here.send("stop")
        samples += here.recv()
        process.join()


async def floods(port: int) -> AsyncIterator[str]:
    """Hold the load that the queue must answer beside, each kind while its name is out."""
    head = b"GET /v1/status HTTP/1.1\r\nX: " + b"a" * (64 * MIB)
    yield f"64 MiB of head: {await send(port, (head,))}"
    for name, count, start in (("200 half-open", 200, b"GET / HT"), ("500 idle", 500, b"")):
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(count)]
        for writer in writers:
            writer.write(start)
        yield name
        for writer in writers:
            writer.transport.abort()


async def attack(of: Program, arguments: argparse.Namespace) -> dict[str, object]:
    port = of.port
    token = TOKEN if arguments.token else None
    async with QueueClient(f"http://127.0.0.1:{port}", token, patience_s=30) as client:
        await client.begin_session(BeginSession(0, 0, 9, resume=False))
        with suppress(Exception):  # Only makes tickets that a group can be for.
            for state in (ServerState.SYNCING, ServerState.SERVING):
                await client.put_server(Server("vllm-0", "http://127.0.0.1:1", state, 0))
            await client.tickets(TicketRequest("w", 4, wait_s=0.0))
    makes = Attack(token)
    for make in makes.kinds:  # The first request of a kind loads and caches: no growth.
        await send(port, make())
    before = of.process.memory_info().rss
    by_status: Counter[str] = Counter()
    hung: Counter[str] = Counter()
    failed: list[str] = []
    latencies: dict[str, list[float]] = {}
    slots = asyncio.Semaphore(16)

    async def one(make: Callable[[], Request]) -> None:
        async with slots:
            request = make()
            status = await send(port, request)
        by_status[status] += 1
        if status == "hang":
            hung[make.__name__] += 1
        if status == "500":
            failed.append(repr(request)[:200])

    with probing(port, latencies.setdefault("before", [])):
        await asyncio.sleep(5.0)
    with probing(port, latencies.setdefault("requests", [])):
        async with asyncio.TaskGroup() as tasks:
            for number in range(arguments.requests):
                make = makes.kinds[number % len(makes.kinds)]
                tasks.create_task(one(make))
    with probing(port, latencies.setdefault("floods", [])):
        async for _ in floods(port):
            await asyncio.sleep(1.0)
    after = of.process.memory_info().rss
    return {
        "requests": arguments.requests,
        "by_status": dict(sorted(by_status.items())),
        "hangs": dict(hung),
        "errors": failed,
        "healthz_ms": {name: round(max(samples), 1) for name, samples in latencies.items()},
        "probes": sum(map(len, latencies.values())),
        "rss_mb": [round(before / 1e6, 1), round(after / 1e6, 1)],
        "held": not failed
        and not hung
        and not any(status.startswith("5") and status != "503" for status in by_status)
        and max(max(samples) for samples in latencies.values()) < SLOWEST_MS
        and after - before < GROWTH_MB * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1400)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", action="store_true", help="the queue has a token, and the attacker knows it")
    arguments = parser.parse_args()
    settings: Settings = {"queue.token": TOKEN} if arguments.token else {}
    with queue("queue", ROOT, "sqlite", settings, port=arguments.port) as of:
        result = asyncio.run(attack(of, arguments))
    print(json.dumps(result))
    sys.exit(0 if result["held"] else 1)


if __name__ == "__main__":
    main()
