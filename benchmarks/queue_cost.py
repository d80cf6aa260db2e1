"""Measures what groups cost the rollout queue, next to a bare echo of the same bodies, and prints JSON.

    python -m benchmarks.queue_cost cycle [--stores :memory: sqlite postgresql] [--kilobytes 64] [--against CHECKOUT]
    python -m benchmarks.queue_cost scale [--scales workers ...] [--stores :memory:] [--against CHECKOUT]
    python -m benchmarks.queue_cost memory [--groups 10000] [--kilobytes 64] [--workers 8] [--stores sqlite]
    python -m benchmarks.queue_cost page [--viewers 3] [--workers 4] [--kilobytes 64] [--stores sqlite]

`cycle`: workers draw a ticket at a time and submit its group, a learner leases
and acknowledges `--step` groups at a time: by default one, so that a group's life is four requests.
Queues and echos (uvicorn alone, and a route of Starlette, which answer as many bytes) take turns in the same rounds;
the figure is milliseconds of a server's CPU per group, and its ratio to the echo's in Starlette.
`scale`: the same cycle with more tickets in the store, workers that wait, servers, or ready groups, one at a time.
`memory`: workers fill a queue over HTTP, then all groups are leased. The figures are the resident memory of the queue's
process, MB, and groups accepted and leased per second.
`page`: rounds of the cycle with pages open take turns with rounds without one. The figures are [without, with]: p50 and
p99 of /healthz and /v1/status meanwhile, milliseconds, asked by its own process; and the share of a core that the
pages cost: in the load, by the CPU of a group times the groups a second; without it, the whole of an idle queue. Few
workers keep a queue busy; with many, every answer waits for theirs.

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
import time
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.queue_load import (
    ROLLOUTS,
    Connection,
    Cycle,
    begin,
    make_ready,
    probe,
    probed_apart,
    ready,
    rollouts_of,
    viewers,
)
from benchmarks.queue_process import ECHOS, ROOT, Program, Settings, echo, queue
from slipstream.protocol import access, codec
from slipstream.protocol.client import QueueClient
from slipstream.protocol.config.sections.processes import STORES
from slipstream.protocol.messages import Group, LeaseRequest, TicketRequest

RUN_NAME = "cost"
PERMITS_PER_DEPTH = 16


def settings_of(permits: int = 256) -> Settings:
    """Return the settings of a queue that holds nobody up while `permits` groups are outstanding."""
    return {
        "run.name": RUN_NAME,
        "rollout.group_size": ROLLOUTS,
        "learner.groups_per_step": PERMITS_PER_DEPTH,
        "learner.token_budget": 262144,
        "learner.steps": 1_000_000,
        "vllm.max_model_len": 262144,
        "queue.depth": permits / PERMITS_PER_DEPTH,
        "queue.max_staleness": 9999,
        "queue.ticket_timeout_s": 3600,
        "queue.ticket_max_age_s": 7200,
        "queue.capacity_groups": 20000,
        "queue.capacity_bytes": 8 * 2**30,
    }


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
        "healthz_p99_ms": {name: quantile_ms(of, 0.99) for name, of in health.items() if of},
    }


async def measure_cycle(arguments: argparse.Namespace, checkouts: dict[str, Path]) -> list[dict[str, Any]]:
    found = []
    for kilobytes in arguments.kilobytes:
        with ExitStack() as stack:
            programs = [
                stack.enter_context(queue(f"{name} {store}", checkout, store, settings_of()))
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


def fill_store(checkout: Path, folder: Path, tickets: int) -> None:
    """Put tickets that have ended into the SQLite store of a run. The checkout's own code makes the file."""
    if not tickets:
        return
    path = folder / RUN_NAME / "queue.db"
    path.parent.mkdir()
    make = f"from slipstream.rollout_queue.store.sqlite import SqliteStore; SqliteStore(Path({str(path)!r})).close()"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", f"from pathlib import Path; {make}"]
    subprocess.run(command, env=environment, cwd=checkout, check=True)
    names = 'id, "index", attempt, serial, worker_id, version, state, failures, reason, bytes, tokens, oldest_version'
    rows = ((f"{n}.0", n, 0, n, "w", 0, "dropped", 0, "overage", 0, 0, 0, 0, "[]") for n in range(tickets))
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany(f"INSERT INTO tickets ({names}, arrival_version, servers) VALUES ({', '.join('?' * 14)})", rows)


async def measure_scale(arguments: argparse.Namespace, checkouts: dict[str, Path]) -> list[dict[str, Any]]:
    """Measure the cycle of 8 KiB groups while one thing grows."""
    found = []
    for what in arguments.scales:
        for size in SCALES[what]:
            workers, servers = (size if of == what else least for of, least in (("workers", 64), ("servers", 1)))
            ready_groups, tickets = (size if of == what else 0 for of in ("ready", "tickets"))
            settings, fill = settings_of(permits=64 + ready_groups), partial(fill_store, tickets=tickets)
            with ExitStack() as stack:
                programs = [
                    stack.enter_context(queue(f"{name} {store}", checkout, store, settings, fill))
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


async def fill(client: QueueClient, count: int, kilobytes: int, producers: int) -> float:
    """Submit `count` groups from several producers. Returns groups accepted per second."""
    tickets = (await client.tickets(TicketRequest("benchmark", count))).tickets
    assert len(tickets) == count, f"only {len(tickets)} of {count} tickets were given"
    waiting = iter(tickets)

    async def produce() -> None:
        for ticket in waiting:
            rollouts = rollouts_of(kilobytes)
            await client.submit(Group(ticket.id, ticket.index, 0, rollouts, "benchmark", ["vllm-0"], 0.0, 1.0))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(producers):
            tasks.create_task(produce())
    return count / (time.perf_counter() - began)


async def drain(client: QueueClient, session: int, count: int) -> float:
    """Lease `count` groups. Returns groups leased per second."""
    began, taken = time.perf_counter(), 0
    while taken < count:
        taken += len((await client.lease(LeaseRequest(session, f"lease-{taken}", 64))).groups)
    return count / (time.perf_counter() - began)


async def measure_memory(arguments: argparse.Namespace, checkouts: dict[str, Path]) -> list[dict[str, Any]]:
    """Measure the memory of a queue that is filled and then leased from."""
    found, count = [], arguments.groups
    settings: Settings = {"queue.depth": 1.0, "queue.ticket_timeout_s": 3600, "queue.capacity_groups": count}
    settings["learner.groups_per_step"] = count
    for (name, checkout), store, kilobytes in product(checkouts.items(), arguments.stores, arguments.kilobytes):
        with queue(f"{name} {store}", checkout, store, settings) as of:
            await ready(of)
            await begin(of)
            memory = [of.process.memory_info().rss]
            async with QueueClient(f"http://127.0.0.1:{of.port}") as client:
                puts = await fill(client, count, kilobytes, arguments.workers)
                memory.append(of.process.memory_info().rss)
                leases = await drain(client, of.session, count)
                memory.append(of.process.memory_info().rss)
        empty, full, leased = (round(rss / 1e6, 1) for rss in memory)
        group = Group("0.0", 0, 0, rollouts_of(kilobytes), "benchmark", ["vllm-0"], 0.0, 1.0)
        found.append(
            {
                "queue": of.name,
                "groups": count,
                "group_bytes": len(codec.encode(group)),
                "rss_mb_empty": empty,
                "rss_mb": full,
                "rss_mb_after_leases": leased,
                "puts_per_s": round(puts, 1),
                "leases_per_s": round(leases, 1),
            }
        )
    return found


async def measure_page(arguments: argparse.Namespace, checkouts: dict[str, Path]) -> list[dict[str, Any]]:
    """Measure what open pages cost a queue, and whether it answers next to them."""
    found, counts = [], (0, arguments.viewers)
    for (name, checkout), store, kilobytes in product(checkouts.items(), arguments.stores, arguments.kilobytes):
        cpu, wall, idle = ({count: list[float]() for count in counts} for _ in range(3))
        asked = {count: {path: list[float]() for path in (access.HEALTH, access.STATUS)} for count in counts}
        for _ in range(arguments.rounds):
            # Each has a new queue: no weights are published, and so many steps would reach the staleness bound.
            with queue(f"{name} {store}", checkout, store, settings_of()) as of:
                await ready(of)
                await begin(of)
                cycle = Cycle(of, kilobytes, {}, PERMITS_PER_DEPTH)
                workers, learner = [Connection(of.port) for _ in range(arguments.workers)], Connection(of.port)
                await cycle.run(max(64, arguments.groups // 4), workers, learner)  # warms up
                for count in counts:
                    async with viewers(of, count):
                        before, began = of.cpu_s(), time.perf_counter()
                        async with probed_apart(of, asked[count]):
                            await cycle.run(arguments.groups, workers, learner)
                        cpu[count].append((of.cpu_s() - before) / arguments.groups)
                        wall[count].append((time.perf_counter() - began) / arguments.groups)
                        before, began = of.cpu_s(), time.perf_counter()
                        await asyncio.sleep(arguments.idle_s)
                        idle[count].append((of.cpu_s() - before) / (time.perf_counter() - began))
                for connection in (*workers, learner):
                    connection.close()
        more = statistics.median(b - a for a, b in zip(*cpu.values(), strict=True))
        found.append(
            {
                "queue": of.name,
                "viewers": list(counts),
                "cpu_ms_per_group": [round(1000 * statistics.median(cpu[count]), 3) for count in counts],
                "groups_per_s": [round(1 / statistics.median(wall[count])) for count in counts],
                **{
                    f"{path}_p50_p99_ms": [
                        [quantile_ms(asked[count][path], q) for q in (0.5, 0.99)] for count in counts
                    ]
                    for path in (access.HEALTH, access.STATUS)
                },
                "cpu_share_idle": [round(statistics.median(idle[count]), 4) for count in counts],
                "page_share_loaded": round(more / statistics.median(wall[arguments.viewers]), 4),
            }
        )
    return found


def quantile_ms(seconds: list[float], share: float) -> float:
    """Return the time, in milliseconds, that a share of the answers did not exceed."""
    return round(1000 * sorted(seconds)[int(share * (len(seconds) - 1))], 1)


MODES = {"cycle": measure_cycle, "scale": measure_scale, "memory": measure_memory, "page": measure_page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in MODES:
        of_mode = modes.add_parser(mode)
        in_memory, alone = mode == "memory", mode in ("memory", "page")
        of_mode.add_argument("--stores", nargs="+", default=["sqlite"] if alone else STORES, choices=STORES)
        of_mode.add_argument("--against", type=Path, help="an older checkout, measured beside")
        of_mode.add_argument("--groups", type=int, default=10_000 if in_memory else 1000)
        of_mode.add_argument("--workers", type=int, default={"memory": 8, "page": 4}.get(mode, 32))
        if mode != "scale":
            of_mode.add_argument("--kilobytes", nargs="+", type=int, default=[64] if alone else [64, 1024])
        if not in_memory:
            of_mode.add_argument("--rounds", type=int, default=5)
    one = "groups that are leased and acknowledged at a time"
    modes.choices["cycle"].add_argument("--step", type=int, default=1, help=one)
    modes.choices["page"].add_argument("--viewers", type=int, default=3)
    modes.choices["page"].add_argument("--idle-s", type=float, default=10.0, help="seconds without load in each round")
    modes.choices["scale"].add_argument("--scales", nargs="+", default=[*SCALES], choices=[*SCALES])
    arguments = parser.parse_args()
    checkouts = {"new": ROOT, **({"old": arguments.against.resolve()} if arguments.against else {})}
    print(json.dumps(asyncio.run(MODES[arguments.mode](arguments, checkouts)), indent=2))


if __name__ == "__main__":
    main()
