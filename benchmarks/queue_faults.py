"""Kills and stops real queues, and their PostgreSQL, under full load; audits what was promised, and prints JSON.

    python -m benchmarks.queue_faults [--schedules sqlite_kills postgres_kills database_kills postgres_stops
        sqlite_stops] [--faults N] [--stop-s 60] [--seed 0]

Workers draw tickets, send heartbeats and submit groups of 64 KB; some send theirs slowly. A learner leases,
acknowledges, reports checkpoints and now and then resumes from one. All of them keep their own account of every answer
that they got, and an observer asks for the position and the sums all the time.

`silent_s`: seconds from a fault to the next ticket, accepted group or acknowledged step; of a stop without a standby,
from its end. `all_s`: until every worker and the learner had an answer again.
`violations`: sentences about promises that were not kept; none is right. Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.queue_account import (
    GROUPS_PER_STEP,
    MAX_STALENESS,
    PATIENCE_S,
    TOTAL_STEPS,
    Account,
    Learner,
    Worker,
    audit,
    observe,
)
from benchmarks.queue_load import ROLLOUTS, Connection
from benchmarks.queue_process import Settings, free_port, start, write_run_file
from slipstream.protocol import access
from slipstream.protocol.client import QueueClient
from slipstream.protocol.messages import RunPosition
from tests.kit.postgres import Cluster, find_programs

WORKERS = 16
SLOW_WORKERS = 4  # each has a body under way for half of the time
# Shorter than a stop, so that a deadline that counted it would show.
TICKET_TIMEOUT_S, LEASE_TIMEOUT_S = 15.0, 15.0
ON_THEIR_WAY_S = 0.05
PAUSE_S = (0.5, 3.0)  # between the recovery from a fault and the next one

Act = Callable[[], Awaitable[float]]  # makes a fault; returns from when on answers are missed


class Queues:
    """The queue processes of a run. Those beyond the first need a database."""

    def __init__(self, folder: Path, store: str, count: int) -> None:
        self._folder = folder
        self.ports = [free_port() for _ in range(count)]
        self.url = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
        settings: Settings = {
            "run.name": "faults",
            "rollout.group_size": ROLLOUTS,
            "learner.groups_per_step": GROUPS_PER_STEP,
            "learner.steps": TOTAL_STEPS,
            "learner.token_budget": 16384,
            "vllm.max_model_len": 16384,
            "queue.store": store,
            "queue.url": self.url,
            "queue.max_staleness": MAX_STALENESS,
            "queue.depth": MAX_STALENESS + 1,
            "queue.ticket_timeout_s": TICKET_TIMEOUT_S,
            "queue.lease_timeout_s": LEASE_TIMEOUT_S,
        }
        self.files = [
            write_run_file(folder, port, settings, f"run-{number}.toml") for number, port in enumerate(self.ports)
        ]
        self.running: list[subprocess.Popen[bytes] | None] = [None] * count
        self.log = (folder / "queue.log").open("ab")

    def start(self, number: int) -> None:
        self.running[number] = start(self.files[number], output=self.log)

    def send(self, number: int, what: signal.Signals) -> None:
        process = self.running[number]
        assert process is not None
        if process.poll() is not None:
            raise RuntimeError(f"a queue ended by itself with {process.returncode}: {self.tail()}")
        process.send_signal(what)
        if what is signal.SIGKILL:
            process.wait()

    async def active(self) -> int:
        """Wait until a queue is active, and return its number."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for number, port in enumerate(self.ports):
                if await self._is_ready(port):
                    return number
            await asyncio.sleep(0.02)
        raise RuntimeError(f"no queue is active: {self.tail()}")

    async def stands_by(self, number: int) -> None:
        """Wait until a queue answers, active or not."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(1):
                    connection = Connection(self.ports[number])
                    await connection.ask("GET", access.HEALTH)
                    connection.close()
                    return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"a queue does not come up: {self.tail()}")

    @staticmethod
    async def _is_ready(port: int) -> bool:
        connection = Connection(port)
        try:
            async with asyncio.timeout(1):
                return (await connection.ask("GET", access.READY))[0] == 200
        except (OSError, EOFError, TimeoutError):
            return False
        finally:
            connection.close()

    def tail(self) -> str:
        return (self._folder / "queue.log").read_text()[-2000:]

    def end(self) -> list[int]:
        """End all queues by a signal. Returns their exit codes."""
        found = []
        for process in self.running:
            if process is not None:
                process.terminate()
                try:
                    found.append(process.wait(30))
                except subprocess.TimeoutExpired:
                    process.kill()
                    found.append(process.wait())
        return found


class Faults:
    """The faults that a schedule makes; each returns from when on answers are missed."""

    def __init__(self, queues: Queues, account: Account, cluster: Cluster | None, stop_s: float) -> None:
        self._queues = queues
        self._account = account
        self._cluster = cluster
        self._stop_s = stop_s

    def _begin(self) -> float:
        self._account.answered.clear()
        return time.monotonic()

    async def kill(self) -> float:
        """Kill the active queue and start it again: at once without a standby, else once another one is active."""
        queues = self._queues
        number = await queues.active()
        queues.send(number, signal.SIGKILL)
        began = self._begin()
        if len(queues.ports) > 1:
            await queues.active()
        queues.start(number)
        await queues.stands_by(number)
        return began

    async def kill_database(self) -> float:
        assert self._cluster is not None
        began = self._begin()
        await asyncio.to_thread(self._cluster.kill)
        await asyncio.to_thread(self._cluster.start)
        return began

    async def stop(self) -> float:
        """Stop the active queue, and let it continue later. Asks it for the position as it wakes."""
        queues, account = self._queues, self._account
        number = await queues.active()
        queues.send(number, signal.SIGSTOP)
        began = self._begin()
        await asyncio.sleep(self._stop_s)
        floor = account.version
        asking = [asyncio.create_task(self._ask_woken(queues.ports[number], floor)) for _ in range(4)]
        await asyncio.sleep(0.2)
        queues.send(number, signal.SIGCONT)
        woken = time.monotonic() if len(queues.ports) > 1 else self._begin()
        await asyncio.gather(*asking)
        await queues.stands_by(number)
        return began if len(queues.ports) > 1 else woken

    async def _ask_woken(self, port: int, floor: int) -> None:
        """Ask a queue that wakes for the position, as a client that still takes it for the active one would."""
        until = time.monotonic() + 3
        while time.monotonic() < until:
            connection = Connection(port)
            try:
                async with asyncio.timeout(3):
                    status, body = await connection.ask("GET", access.POLICY)
                self._account.counts[f"woken_{status}"] += 1
                if status == 200:
                    self._account.position(msgspec.json.decode(body, type=RunPosition), floor)
            except (OSError, EOFError, TimeoutError):
                pass
            finally:
                connection.close()
            await asyncio.sleep(0.02)


async def recovered(account: Account, since: float) -> tuple[float, float]:
    """Wait until promises are made again, and everybody had an answer. Returns both, seconds from `since`."""
    async with asyncio.timeout(PATIENCE_S):
        # Answers that were on their way may still arrive.
        while not account.promises or account.promises[-1] <= since + ON_THEIR_WAY_S:
            account.promised.clear()
            await account.promised.wait()
        first = account.promises[bisect_right(account.promises, since + ON_THEIR_WAY_S)] - since
        while len(account.answered) < WORKERS + SLOW_WORKERS + 1:  # noqa: ASYNC110 - of many
            await asyncio.sleep(0.05)
        return first, max(account.answered.values()) - since


def act_of(faults: Faults, schedule: str) -> Act:
    return {
        "sqlite_kills": faults.kill,
        "postgres_kills": faults.kill,
        "database_kills": faults.kill_database,
        "postgres_stops": faults.stop,
        "sqlite_stops": faults.stop,
    }[schedule]


NUMBERS = {"sqlite_kills": 20, "postgres_kills": 20, "database_kills": 10, "postgres_stops": 5, "sqlite_stops": 5}


async def run(schedule: str, number: int, stop_s: float, cluster: Cluster | None) -> dict[str, Any]:
    """Run one schedule. Returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        store = "sqlite" if cluster is None else cluster.new_database()
        queues = Queues(Path(folder), store, 1 if cluster is None else 2)
        account, over = Account(), asyncio.Event()
        first: list[float] = []
        every: list[float] = []
        codes: list[int] = []
        began = time.monotonic()
        try:
            queues.start(0)
            await queues.active()
            for standby in range(1, len(queues.ports)):
                queues.start(standby)
                await queues.stands_by(standby)
            act = act_of(Faults(queues, account, cluster, stop_s), schedule)
            async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:

                async def client() -> QueueClient:
                    return await stack.enter_async_context(QueueClient(queues.url, patience_s=PATIENCE_S))

                observing = tasks.create_task(observe(await client(), account))
                tasks.create_task(Learner(await client(), account).run(over))
                for n in range(WORKERS + SLOW_WORKERS):
                    tasks.create_task(Worker(f"w-{n}", await client(), account, n >= WORKERS).run(over))
                while len(account.answered) < WORKERS + SLOW_WORKERS + 1:  # noqa: ASYNC110 - of many
                    await asyncio.sleep(0.05)
                for _ in range(number):
                    await asyncio.sleep(random.uniform(*PAUSE_S))
                    some, all_of = await recovered(account, await act())
                    first.append(some)
                    every.append(all_of)
                await asyncio.sleep(2)
                over.set()
                observing.cancel()
        finally:
            codes = queues.end()
            if any(codes) or account.violations:
                print(queues.tail(), file=sys.stderr)
        if any(codes):
            account.violated(f"a queue ended with {codes} after a signal")
        return {
            "schedule": schedule,
            "faults": len(first),
            "stop_s": stop_s if schedule.endswith("stops") else None,
            "wall_s": round(time.monotonic() - began, 1),
            "silent_s": spread(first),
            "all_s": spread(every),
            "accepted": len(account.accepted),
            "trained": len(account.trained),
            "version": account.version,
            "counts": dict(account.counts),
            **audit(queues.files[0], account),
            "violations": account.violations,
        }


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "max": round(max(seconds), 2)} if seconds else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=list(NUMBERS), default=list(NUMBERS))
    parser.add_argument("--faults", type=int, help="of each schedule; default: 20, 20, 10, 5, 5")
    parser.add_argument("--stop-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random.seed(given.seed)
    os.environ.pop("SLIPSTREAM_TOKEN", None)
    programs = find_programs()
    found = []
    for schedule in given.schedules:
        cluster = None
        if not schedule.startswith("sqlite"):
            if programs is None:
                print(f"{schedule}: there is no PostgreSQL here", file=sys.stderr)
                continue
            cluster = Cluster(programs)
        try:
            found.append(asyncio.run(run(schedule, given.faults or NUMBERS[schedule], given.stop_s, cluster)))
        finally:
            if cluster is not None:
                cluster.close()
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))
    return 1 if any(of["violations"] for of in found) else 0


if __name__ == "__main__":
    sys.exit(main())
