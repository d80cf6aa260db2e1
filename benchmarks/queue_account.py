"""Workers and a learner that keep account of every promise of a queue, for `benchmarks.queue_faults`."""

from __future__ import annotations

import asyncio
import random
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.queue_load import Connection, rollouts_of
from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import MSGPACK, QueueClient, QueueError, QueueRefused
from slipstream.protocol.config import load
from slipstream.protocol.messages import (
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
from slipstream.rollout_queue.store import open_for_reading

GROUPS_PER_STEP = 8
KILOBYTES = 64
STEPS_PER_CHECKPOINT, STEPS_PER_RESUME = 5, 37
TOTAL_STEPS = 1_000_000
MAX_STALENESS = 4
PATIENCE_S = 120.0


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
    """Draws tickets and submits a group for each, next to heartbeats. `slow`: sends its groups in two halves."""

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


def audit(run_file: Path, account: Account) -> dict[str, Any]:
    """Compare what the store holds with what was promised. No queue runs any more."""
    rows = {row.ticket_id: row for row in open_for_reading(load(run_file)).read_ledger()}
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
