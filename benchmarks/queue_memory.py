"""Fills a real queue process over HTTP and prints its memory and speed as JSON.

    python benchmarks/queue_memory.py [--groups 10000] [--kilobytes 64] [--producers 8]

Client and queue run on the same machine.

rss_mb: Resident memory of the queue's process, MB.
puts_per_s: Groups accepted per second.
leases_per_s: Groups leased per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from protocol import codec
from protocol.client import QueueClient
from protocol.messages import (
    BeginSession,
    Group,
    LeaseRequest,
    Rollout,
    Segment,
    Server,
    ServerState,
    Ticket,
    TicketRequest,
    VersionSpan,
)
from rollout_queue.service import listen

ROLLOUTS = 8
BYTES_PER_TOKEN = 9  # An int32 id, a float32 log-prob and a bool of the mask.
SERVE = (
    "import sys; from protocol.config import load; from rollout_queue.service import serve; serve(load(sys.argv[1]))"
)


def group_of(ticket: Ticket, kilobytes: int) -> Group:
    """Return a valid group of about `kilobytes` KiB for a ticket."""
    length = kilobytes * 1024 // ROLLOUTS // BYTES_PER_TOKEN
    segment = Segment(
        np.arange(length, dtype=np.int32),
        np.ones(length, dtype=np.bool_),
        np.full(length, -0.5, dtype=np.float32),
        [VersionSpan(0, 0, length, 0)],
    )
    rollouts = [Rollout([segment], 1.0, "stop") for _ in range(ROLLOUTS)]
    return Group(ticket.id, ticket.index, 0, rollouts, "benchmark", ["vllm-0"], 0.0, 1.0)


async def fill(client: QueueClient, count: int, kilobytes: int, producers: int) -> float:
    """Submit `count` groups from several producers.

    Returns:
        Groups accepted per second.
    """
    tickets = (await client.tickets(TicketRequest("benchmark", count))).tickets
    assert len(tickets) == count, f"only {len(tickets)} of {count} tickets were given"
    waiting = iter(tickets)

    async def produce() -> None:
        for ticket in waiting:
            await client.submit(group_of(ticket, kilobytes))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(producers):
            tasks.create_task(produce())
    return count / (time.perf_counter() - started)


async def drain(client: QueueClient, session: int, count: int) -> float:
    """Lease `count` groups.

    Returns:
        Groups leased per second.
    """
    started, taken = time.perf_counter(), 0
    while taken < count:
        taken += len((await client.lease(LeaseRequest(session, f"lease-{taken}", 64))).groups)
    return count / (time.perf_counter() - started)


async def measure(url: str, pid: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Fill the queue at `url` (process `pid`), drain it, and return its memory and speed by name."""
    memory = psutil.Process(pid)
    async with QueueClient(url) as client:
        session = (await client.begin_session(BeginSession(0, 0, 1, resume=False))).session
        server = (await client.servers())[0]
        for state in (ServerState.SYNCING, ServerState.SERVING):
            await client.put_server(Server(server.name, server.url, state, 0), session)
        empty = memory.memory_info().rss
        puts = await fill(client, arguments.groups, arguments.kilobytes, arguments.producers)
        full = memory.memory_info().rss
        leases = await drain(client, session, arguments.groups)
    return {
        "groups": arguments.groups,
        "group_bytes": len(codec.encode(group_of(Ticket("0.0", 0, ROLLOUTS, 0, 0, 60.0), arguments.kilobytes))),
        "rss_mb_empty": round(empty / 1e6, 1),
        "rss_mb": round(full / 1e6, 1),
        "rss_mb_after_leases": round(memory.memory_info().rss / 1e6, 1),
        "puts_per_s": round(puts, 1),
        "leases_per_s": round(leases, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--kilobytes", type=int, default=64)
    parser.add_argument("--producers", type=int, default=8)
    arguments = parser.parse_args()
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").touch()
        run_file = Path(folder, "run.toml")
        run_file.write_text(
            f'run.dir = "{folder}"\nmodel.path = "tiny"\ntask.path = "task.py:task"\nqueue.port = {port}\n'
            f"queue.depth = 1.0\nqueue.ticket_timeout_s = 3600\nqueue.capacity_groups = {arguments.groups}\n"
            f"learner.groups_per_step = {arguments.groups}\n"
        )
        queue = subprocess.Popen([sys.executable, "-c", SERVE, str(run_file)])
        try:
            print(json.dumps(asyncio.run(measure(f"http://127.0.0.1:{port}", queue.pid, arguments))))
        finally:
            queue.terminate()
            queue.wait()


if __name__ == "__main__":
    main()
