"""Runs a fleet of fake workers as processes against one queue, then more than it takes, and prints JSON.

    python -m benchmarks.queue_fleet [--workers 2000] [--beyond 300] [--seconds 60] [--store sqlite]

Each worker is a process with connections of its own: it registers, sends a heartbeat every 5 s, waits for tickets by
long-polls, and submits a small group for each some seconds later. A learner leases and acknowledges throughout;
operators ask for health, status and metrics. Then `--beyond` more workers come, for a third of the time.

`served`: workers that got a ticket and had a group accepted. `refused_in_words`: workers beyond the limit that
were answered 503 with a reason and Retry-After. `cpu_share`: CPU seconds of the queue a second.
The parent of the workers imports little, so that they share its memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

HEARTBEAT_S = 5.0
GENERATES_S = (8.0, 16.0)
POLL_S = 30.0
FORKS_PER_S = 100
GROUPS_PER_STEP = 64
FINGERPRINT = {"release": "1", "tokenizer": "t", "chat": "c", "rollout": {}, "rows": 1_000_000, "data": "d"}

# What a worker writes into memory that all share: four numbers.
COUNTS = struct.Struct("iiii")
TICKETS, ACCEPTED, BUSY, ERRORS = range(4)


class Caller:
    """A connection with at most one request under way. `what`: what was asked; None if nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.socket: socket.socket | None = None
        self.what: str | None = None
        self._received = b""

    def ask(self, what: str, method: str, path: str, body: bytes, kind: str = "application/json") -> None:
        if self.socket is None:
            self.socket = socket.create_connection(("127.0.0.1", self._port), 60)
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
        self.socket.sendall(head.encode() + b"\r\n" + body)
        self.what, self._received = what, b""

    def answer(self) -> tuple[int, bytes, bytes] | None:
        """Return status, head and body once they are there. Raises OSError if the connection ended."""
        assert self.socket is not None
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return None
        at = head.lower().find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(body) < size:
            return None
        self.what = None
        return int(head[9:12]), head, body

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket = self.what = None


class FakeWorker:
    """One worker's life."""

    def __init__(self, name: str, port: int, group: dict[str, msgspec.Raw], counts: list[int]) -> None:
        self.counts = counts
        self._name = name
        self._group = group
        self._poll, self._beat, self._put = (Caller(port) for _ in range(3))
        self._held: dict[str, tuple[float, int]] = {}  # when the group is done, and its index, by ticket
        self._registered = False
        self._beat_at = self._poll_at = time.monotonic()

    def turn(self) -> None:
        """Ask for what is due, and take in the answers of up to a second."""
        now = time.monotonic()
        if self._beat.what is None and now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_S
            report = {"worker_id": self._name, "ticket_ids": list(self._held), "fingerprint": FINGERPRINT}
            self._ask(self._beat, "beat", "POST", f"/v1/workers/{self._name}", msgspec.json.encode(report))
        if self._registered and not self._held and self._poll.what is None and now >= self._poll_at:
            self._poll_at = now
            request = {"worker_id": self._name, "max_tickets": 1, "wait_s": POLL_S, "have": list(self._held)}
            self._ask(self._poll, "poll", "POST", "/v1/tickets", msgspec.json.encode(request))
        done = [name for name, (at, _) in self._held.items() if at <= now]
        if done and self._put.what is None:
            changed = {"ticket_id": done[0], "index": self._held[done[0]][1], "worker_id": self._name}
            group = self._group | {key: msgspec.Raw(msgspec.msgpack.encode(value)) for key, value in changed.items()}
            body = msgspec.msgpack.encode(group)
            self._ask(self._put, done[0], "PUT", f"/v1/groups/{done[0]}", body, "application/msgpack")
        callers = {one.socket: one for one in (self._poll, self._beat, self._put) if one.what is not None}
        if not callers:
            time.sleep(0.25)
            return
        for ready in select.select(list(callers), [], [], 1.0)[0]:
            self._read(callers[ready])

    def _ask(self, caller: Caller, *request: Any) -> None:
        try:
            caller.ask(*request)
        except OSError:
            self._failed(caller)

    def _failed(self, caller: Caller) -> None:
        self.counts[ERRORS] += 1
        caller.close()
        self._poll_at = time.monotonic() + 1.0

    def _read(self, caller: Caller) -> None:
        what = caller.what
        assert what is not None
        try:
            answer = caller.answer()
        except OSError:
            self._failed(caller)
            return
        if answer is None:
            return
        status, head, body = answer
        if status == 503 and b"retry-after:" in head.lower() and b'"busy"' in body:
            self.counts[BUSY] += 1
        elif what == "beat":
            self._registered = status == 200
            self.counts[ERRORS] += status != 200
        elif what == "poll":
            for ticket in msgspec.json.decode(body)["tickets"] if status == 200 else []:
                self.counts[TICKETS] += 1
                self._held[ticket["id"]] = time.monotonic() + random.uniform(*GENERATES_S), ticket["index"]
            self.counts[ERRORS] += status not in (200, 204)
            self._poll_at += 0 if status in (200, 204) else 1.0
        else:
            del self._held[what]
            self.counts[ACCEPTED] += status in (200, 201)
            self.counts[ERRORS] += status not in (200, 201)


def fleet(port: int, count: int, name: str, template: Path) -> None:
    """Fork the workers, until stdin ends; then print their counts as JSON."""
    group = msgspec.msgpack.decode(template.read_bytes(), type=dict[str, msgspec.Raw])
    shared = mmap.mmap(-1, COUNTS.size * count)
    children = []
    for number in range(count):
        if child := os.fork():
            children.append(child)
            time.sleep(1 / FORKS_PER_S)
            continue
        random.seed(number)
        worker = FakeWorker(f"{name}-{number}", port, group, [0, 0, 0, 0])
        try:
            while os.getppid() != 1:
                worker.turn()
                COUNTS.pack_into(shared, number * COUNTS.size, *worker.counts)
        finally:
            os._exit(0)
    print("up", flush=True)
    sys.stdin.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(json.dumps(list(COUNTS.iter_unpack(shared[:]))), flush=True)


class Fleet:
    """The workers, as a process with its children."""

    def __init__(self, port: int, count: int, name: str, template: Path) -> None:
        command = [sys.executable, __file__, "--fleet", str(port), str(count), name, str(template)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait_up(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"

    def end(self) -> list[list[int]]:
        """End the workers. Returns the counts of each."""
        found, _ = self._process.communicate(b"", 60)
        return json.loads(found)  # type: ignore[no-any-return]


async def measure(queue: Any, given: argparse.Namespace, template: Path) -> dict[str, Any]:
    """Let the fleet come, and more than the queue takes. Returns the figures."""
    import asyncio

    from benchmarks.queue_load import Connection, begin, ready
    from slipstream.protocol import access, codec
    from slipstream.protocol.messages import Fingerprint

    port, process = queue.port, queue.process
    await ready(queue)
    await begin(queue, fingerprint=Fingerprint("1", "t", "c", {}))
    seconds: dict[str, list[float]] = {name: [] for name in ("healthz", "status", "metrics", "learner")}

    async def ask(name: str, path: str, every_s: float) -> None:
        own = Connection(port)
        while True:
            began = time.perf_counter()
            status, body = await own.ask("GET", path)
            assert status == 200, (path, status, body[:200])
            seconds[name].append(time.perf_counter() - began)
            await asyncio.sleep(every_s)

    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(ask("healthz", access.HEALTH, 0.05)),
            tasks.create_task(ask("status", access.STATUS, 2.0)),
            tasks.create_task(ask("metrics", access.METRICS, 2.0)),
            tasks.create_task(learn(queue, seconds["learner"])),
        ]

        async def phase(name: str, seconds_: float) -> dict[str, Any]:
            for of in seconds.values():
                of.clear()
            cpu, began = queue.cpu_s(), time.perf_counter()
            await asyncio.sleep(seconds_)
            wall = time.perf_counter() - began
            return {
                "phase": name,
                "cpu_share": round((queue.cpu_s() - cpu) / wall, 3),
                "rss_mb": round(process.memory_info().rss / 2**20),
                "connections": len(process.net_connections()),
                **{f"{what}_ms": spread(of) for what, of in seconds.items()},
            }

        found = [await phase("nobody", 5)]
        workers = Fleet(port, given.workers, "w", template)
        came = time.perf_counter()
        await asyncio.to_thread(workers.wait_up)
        found.append(await phase("fleet", given.seconds))
        more = Fleet(port, given.beyond, "beyond", template)
        await asyncio.to_thread(more.wait_up)
        found.append(await phase("fleet and beyond", given.seconds / 3))
        lasted = time.perf_counter() - came
        last = Connection(port)
        status = codec.decode_json((await last.ask("GET", access.STATUS))[1], dict)
        beyond, counts = await asyncio.to_thread(more.end), await asyncio.to_thread(workers.end)
        for task in running:
            task.cancel()
    totals = [sum(of) for of in zip(*counts, strict=True)]
    return {
        "workers": given.workers,
        "served": sum(of[TICKETS] > 0 and of[ACCEPTED] > 0 for of in counts),
        "tickets": totals[TICKETS],
        "accepted": totals[ACCEPTED],
        "accepted_per_s": round(totals[ACCEPTED] / lasted, 1),
        "busy": totals[BUSY],
        "errors": totals[ERRORS],
        "beyond": given.beyond,
        "refused_in_words": sum(of[BUSY] > 0 for of in beyond),
        "beyond_served": sum(of[ACCEPTED] > 0 for of in beyond),
        "beyond_errors": sum(of[ERRORS] for of in beyond),
        "steps": queue.version,
        "status_connections": status["connections"],
        "phases": found,
    }


async def learn(queue: Any, seconds: list[float]) -> None:
    """Lease and acknowledge until cancelled, and note the seconds of answers that wait for nothing."""
    from benchmarks.queue_load import Connection
    from slipstream.protocol import access, codec
    from slipstream.protocol.messages import Group, LeaseAck, LeaseReply, LeaseRequest, RunPosition

    connection = Connection(queue.port)
    while True:
        lease, have = f"lease-{queue.version}", list[str]()
        while len(have) < GROUPS_PER_STEP:
            request = LeaseRequest(queue.session, lease, GROUPS_PER_STEP - len(have), have, wait_s=30.0)
            status, body = await connection.ask("POST", access.LEASES, codec.encode_json(request))
            assert status == 200, (status, body[:300])
            have += [codec.decode(bytes(raw), Group).ticket_id for raw in codec.decode(body, LeaseReply).groups]
        queue.version += 1
        began = time.perf_counter()
        ack = LeaseAck(queue.session, have, {}, queue.version, queue.version)
        await connection.told("POST", access.LEASE_ACK_OF.format(id=lease), ack, RunPosition)
        seconds.append(time.perf_counter() - began)


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum, ms."""
    ranked = sorted(seconds)
    if not ranked:
        return {}
    at = {"median": len(ranked) // 2, "p99": int(len(ranked) * 0.99), "max": len(ranked) - 1}
    return {name: round(ranked[number] * 1e3, 1) for name, number in at.items()} | {"count": len(ranked)}


def main() -> None:
    import asyncio

    from benchmarks.queue_load import ROLLOUTS, rollouts_of
    from benchmarks.queue_process import ROOT, Settings, queue
    from slipstream.protocol import codec
    from slipstream.protocol.messages import Group

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--beyond", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--store", default="sqlite")
    given = parser.parse_args()
    os.environ.pop("SLIPSTREAM_TOKEN", None)
    settings: Settings = {
        "run.name": "fleet",
        "rollout.group_size": ROLLOUTS,
        "learner.groups_per_step": GROUPS_PER_STEP,
        "learner.token_budget": 16384,
        "learner.steps": 1_000_000,
        "vllm.max_model_len": 16384,
        "queue.max_workers": given.workers,
        "queue.max_staleness": 9999,
        "queue.depth": 2 * given.workers / GROUPS_PER_STEP,
    }
    with tempfile.TemporaryDirectory() as folder, queue("queue", ROOT, given.store, settings) as of:
        template = Path(folder, "group")
        template.write_bytes(codec.encode(Group("0.0", 0, 0, rollouts_of(2), "w", ["vllm-0"], 0.0, 1.0)))
        print(json.dumps(asyncio.run(measure(of, given, template)), indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fleet"]:
        fleet(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    else:
        main()
