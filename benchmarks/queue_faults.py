"""Kills and stops real queues, and their PostgreSQL, under full load; audits what was promised, and prints JSON.

    python benchmarks/queue_faults.py [--schedules sqlite_kills postgres_kills database_kills postgres_stops
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
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.queue_cost import ROLLOUTS, ROOT, SERVE, Connection, free_port, rollouts_of
from protocol import access, codec, reasons
from protocol.client import MSGPACK, QueueClient, QueueError, QueueRefused
from protocol.config import load
from protocol.messages import (
    BeginSession,
    Group,
    LeaseAck,
    LeaseRequest,
    RunPosition,
    Server,
    ServerState,
    Ticket,
    TicketRequest,
    WorkerReport,
)
from rollout_queue.store import open_for_reading
from tests.kit.postgres import Cluster, find_programs

GROUPS_PER_STEP = 8
WORKERS = 16
SLOW_WORKERS = 4  # each has a body under way for half of the time
KILOBYTES = 64
STEPS_PER_CHECKPOINT, STEPS_PER_RESUME = 5, 37
TOTAL_STEPS = 1_000_000
MAX_STALENESS = 4
# Shorter than a stop, so that a deadline that counted it would show.
TICKET_TIMEOUT_S, LEASE_TIMEOUT_S = 15.0, 15.0
PATIENCE_S = 120.0
ON_THEIR_WAY_S = 0.05
PAUSE_S = (0.5, 3.0)  # between the recovery from a fault and the next one

Act = Callable[[], Awaitable[float]]  # makes a fault; returns from when on answers are missed


@dataclass
class Account:
    """What the queue has promised, and what it has not kept."""

    violations: list[str] = field(default_factory=list)
    accepted: dict[str, int] = field(default_factory=dict)  # CRC32 of each group that was answered 201 or 200
    trained: dict[str, int] = field(default_factory=dict)  # step by ticket, on the time line that survives
    undone: set[str] = field(default_factory=set)  # trained after a checkpoint that was resumed from
    dropped: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)  # tickets that a heartbeat called lost
    version: int = 0  # the highest that was answered
    step: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    promises: list[float] = field(default_factory=list)  # when each was made
    answered: dict[str, float] = field(default_factory=dict)  # when each had the first answer since a fault
    promised: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, who: str, kind: str = "", promise: bool = True) -> None:
        """Note that somebody got an answer; `promise`: one that a queue has to keep."""
        now = time.monotonic()
        self.answered.setdefault(who, now)
        if kind:
            self.counts[kind] += 1
        if promise:
            self.promises.append(now)
            self.promised.set()

    def violated(self, text: str) -> None:
        self.violations.append(text)
        print(text, file=sys.stderr)

    def position(self, found: RunPosition, floor: int) -> None:
        """Note a position; `floor`: the highest version that was known when it was asked for."""
        if found.version < floor:
            self.violated(f"version {found.version} was answered after {floor}")
        self.version = max(self.version, found.version)


class Worker:
    """Draws tickets and submits a group for each, beside heartbeats. `slow`: sends its groups in two halves."""

    def __init__(self, name: str, client: QueueClient, account: Account, slow: bool) -> None:
        self._name = name
        self._client = client
        self._account = account
        self._slow = slow
        self._held: dict[str, Ticket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rollouts = rollouts_of(KILOBYTES)

    async def run(self, over: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            beat = tasks.create_task(self._beat())
            while not over.is_set():
                have = list(self._held)
                reply = await self._client.tickets(TicketRequest(self._name, 4, wait_s=5.0, have=have))
                self._account.answer(self._name, "polls", promise=bool(reply.tickets))
                for ticket in reply.tickets:
                    if ticket.id in self._account.accepted:
                        self._account.violated(f"ticket {ticket.id} was given again after its group was accepted")
                    if ticket.id not in self._held:
                        self._account.given.add(ticket.id)
                        self._held[ticket.id] = ticket
                        task = tasks.create_task(self._make(ticket))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                while len(self._held) >= 4:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            while self._tasks:
                await asyncio.wait(self._tasks)
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            held = list(self._held)
            reply = await self._client.heartbeat(WorkerReport(self._name, held))
            self._account.answer(self._name, "heartbeats", promise=False)
            # The answer to its group may have been cut off, and the group trained and forgotten since.
            self._account.lost |= set(reply.lost_tickets) & self._held.keys()
            await asyncio.sleep(1.0)

    async def _make(self, ticket: Ticket) -> None:
        await asyncio.sleep(random.uniform(0.0, 0.1))
        made = Group(ticket.id, ticket.index, 0, self._rollouts, self._name, ["vllm-0"], random.random(), 2.0)
        body = codec.encode(made)
        try:
            if self._slow and not await self._submit_slowly(ticket.id, body):
                return
            if not self._slow:
                await self._client.submit(made)
        except QueueRefused as refusal:
            self._account.violated(f"finished work was refused: {refusal}")
        else:
            self._account.accepted[ticket.id] = zlib.crc32(body)
            self._account.answer(self._name, "groups")
        finally:
            del self._held[ticket.id]

    async def _submit_slowly(self, ticket_id: str, body: bytes) -> bool:
        """Send a group in two halves, again until it is answered. Returns whether it was accepted."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            url = self._client.url
            connection = HalvedBody(int(url.rpartition(":")[2]))
            try:
                putting = asyncio.create_task(connection.put(access.GROUP_OF.format(id=ticket_id), body))
                while not putting.done() and self._client.url == url and time.monotonic() < until:
                    await asyncio.wait([putting], timeout=0.1)
                if not putting.done():
                    putting.cancel()
                    continue
                status, answer = putting.result()
                if status in (200, 201):
                    return True
                if status < 500:
                    self._account.violated(f"a group that came slowly was refused: {status} {answer[:200]!r}")
                    return False
            except (OSError, EOFError, TimeoutError):
                pass
            finally:
                connection.close()
            await asyncio.sleep(0.2)
        raise QueueError(f"group {ticket_id} could not be submitted for {PATIENCE_S:g} s")


class HalvedBody(Connection):
    """A connection that carries one body, with a pause in its middle."""

    async def put(self, path: str, body: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._streams = reader, writer
        head = f"PUT {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {MSGPACK}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
        await asyncio.sleep(0.3)
        writer.write(body[len(body) // 2 :])
        top = await reader.readuntil(b"\r\n\r\n")
        at = top.lower().index(b"content-length:")
        return int(top[9:12]), await reader.readexactly(int(top[at + 15 : top.index(b"\r", at)]))


class Learner:
    """Leases and trains; reports checkpoints and resumes from them."""

    def __init__(self, client: QueueClient, account: Account) -> None:
        self._client = client
        self._account = account
        self._session = 0
        self._checkpoint = (0, 0)  # step, version

    async def run(self, over: asyncio.Event) -> None:
        await self._begin(resume=False)
        made = 0
        while not over.is_set():
            await self._step(over)
            step, made = self._account.step, made + 1
            if step % STEPS_PER_CHECKPOINT == 0:
                self._seen(await self._client.checkpointed(self._session, step))
                self._checkpoint = (step, self._account.version)
            if made % STEPS_PER_RESUME == 0:
                await self._begin(resume=True)

    def _seen(self, position: RunPosition) -> None:
        self._account.position(position, self._account.version)
        self._account.answer("learner", promise=False)

    async def _begin(self, resume: bool) -> None:
        account, (step, version) = self._account, self._checkpoint
        self._session = 0
        position = await self._client.begin_session(BeginSession(step, version, TOTAL_STEPS, resume))
        self._session = position.session
        self._seen(position)
        account.step = step
        undone = {name for name, at in account.trained.items() if at > step}
        account.undone |= undone
        for name in undone:
            del account.trained[name]
        account.counts["sessions"] += 1
        await self._publish()

    async def _publish(self) -> None:
        url = next(server.url for server in await self._client.servers() if server.name == "vllm-0")
        if self._account.step == 0:
            await self._client.put_server(Server("vllm-0", url), self._session)
        await self._client.put_server(Server("vllm-0", url, ServerState.SYNCING), self._session)
        serving = Server("vllm-0", url, ServerState.SERVING, self._account.version)
        await self._client.put_server(serving, self._session)

    async def _step(self, over: asyncio.Event) -> None:
        account, lease = self._account, f"lease-{self._session}-{self._account.step}"
        have: list[str] = []
        while len(have) < GROUPS_PER_STEP:
            request = LeaseRequest(self._session, lease, GROUPS_PER_STEP - len(have), have, wait_s=5.0)
            reply = await self._client.lease(request)
            account.answer("learner", "leases", promise=bool(reply.groups))
            for raw in reply.groups:
                self._check(bytes(raw), have)
            for name, why in reply.revoked.items():
                account.violated(f"group {name} was revoked: {why}")
                have.remove(name)
            if over.is_set():
                return
        step, version = account.step + 1, account.version + 1
        position = await self._client.ack(lease, LeaseAck(self._session, have, {}, step, version))
        account.step = step
        account.trained |= dict.fromkeys(have, step)
        account.answer("learner", "steps")
        self._seen(position)
        await self._publish()

    def _check(self, body: bytes, have: list[str]) -> None:
        """Check a leased group, and note it."""
        account = self._account
        group = codec.decode(body, Group)
        name = group.ticket_id
        if name in have or name in account.trained or name in account.dropped:
            account.violated(f"group {name} was leased twice")
        # The worker may still wait for its answer.
        if zlib.crc32(body) != account.accepted.get(name, zlib.crc32(body)):
            account.violated(f"group {name} is not what was submitted")
        have.append(name)


async def observe(client: QueueClient, account: Account) -> None:
    """Ask for the position and the sums until cancelled."""
    while True:
        floor = account.version
        account.position(await client.position(), floor)
        sums = (await client.status()).ledger
        if sums.issued != sums.trained + sums.dropped + sums.reissued + sums.outstanding:
            account.violated(f"the sums do not agree: {sums}")
        await asyncio.sleep(0.2)


class Queues:
    """The queue processes of a run. Those beyond the first need a database."""

    def __init__(self, folder: Path, store: str, count: int) -> None:
        self._folder = folder
        (folder / "task.py").touch()
        self.ports = [free_port() for _ in range(count)]
        self.url = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
        self.files = [folder / f"run-{number}.toml" for number in range(count)]
        for path, port in zip(self.files, self.ports, strict=True):
            path.write_text(
                f'[run]\ndir = "{folder}"\nname = "faults"\n[model]\npath = "tiny"\n[task]\npath = "task.py:task"\n'
                f"[rollout]\ngroup_size = {ROLLOUTS}\n"
                f"[learner]\ngroups_per_step = {GROUPS_PER_STEP}\nsteps = {TOTAL_STEPS}\ntoken_budget = 16384\n"
                f"[vllm]\nmax_model_len = 16384\n"
                f'[queue]\nport = {port}\nstore = "{store}"\nurl = "{self.url}"\nmax_staleness = {MAX_STALENESS}\n'
                f"depth = {MAX_STALENESS + 1}\n"
                f"ticket_timeout_s = {TICKET_TIMEOUT_S}\nlease_timeout_s = {LEASE_TIMEOUT_S}\n"
            )
        self.running: list[subprocess.Popen[bytes] | None] = [None] * count
        self.log = (folder / "queue.log").open("ab")

    def start(self, number: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SERVE, str(self.files[number])]
        self.running[number] = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

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
        """Stop the active queue, and let it go on later. Asks it for the position as it wakes."""
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


def audit(queues: Queues, account: Account) -> dict[str, Any]:
    """Compare what the store holds with what was promised. No queue runs any more."""
    rows = {row.ticket_id: row for row in open_for_reading(load(queues.files[0])).read_ledger()}
    trained = {name: row.step for name, row in rows.items() if row.trained}
    for name in account.trained.keys() | trained.keys():
        if trained.get(name) != account.trained.get(name):
            was, found = account.trained.get(name), rows.get(name)
            account.violated(f"group {name} was acknowledged at step {was}; the ledger: {found}")
    indices = Counter(rows[name].index for name in trained)
    if twice := [index for index, count in indices.items() if count > 1]:
        account.violated(f"rows {twice[:5]} were trained more than once")
    for name in account.accepted:
        row = rows.get(name)
        kept = row is not None and (row.trained or row.state in ("ready", "leased"))
        rolled_back = row is not None and row.state == "reissued" and row.reason == reasons.ROLLED_BACK
        if not kept and not (rolled_back and account.counts["sessions"] > 1):
            account.violated(f"accepted group {name} was lost; the ledger: {row}")
    if lost := account.lost - account.accepted.keys():
        account.violated(f"tickets {sorted(lost)[:5]} were called lost")
    if missing := account.given - rows.keys():
        account.violated(f"{len(missing)} tickets were given that the ledger does not know")
    ends = Counter(f"{row.state}:{row.reason}" if row.reason else str(row.state) for row in rows.values())
    for end in ends:
        if end not in ("trained", "ready", "leased", "issued", f"reissued:{reasons.ROLLED_BACK}"):
            account.violated(f"{ends[end]} tickets ended as {end}")
    return {"tickets": len(rows), "ends": dict(ends)}


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
            **audit(queues, account),
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
