"""A real queue process, killed and restarted under its clients, or with a fleet that waits."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from slipstream.protocol import codec
from slipstream.protocol.client import QueueClient, QueueRefused, RunFinished
from slipstream.protocol.config import ConfigError, RunConfig, load
from slipstream.protocol.messages import (
    BeginSession,
    Group,
    LeaseAck,
    LeaseRequest,
    Server,
    ServerState,
    TicketRequest,
    WorkerReport,
)
from slipstream.rollout_queue.api.connection_pool import raise_descriptors
from slipstream.rollout_queue.broker.lifecycle import ALIVE_S
from slipstream.rollout_queue.ledger.records import Decision, RowOutcome
from slipstream.rollout_queue.ledger.row_estimates import RowEstimates
from slipstream.rollout_queue.service import listen, serve
from slipstream.rollout_queue.store import open_for_reading
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME
from tests.kit import group
from tests.kit.broker import DECLARED, FOUND
from tests.kit.messages import SERVER
from tests.kit.ports import free_port
from tests.kit.queue import serve_version

B, STEPS = 4, 30
FLEET = 2000
SERVE = """
import sys
from slipstream.protocol.config import load
from slipstream.rollout_queue.service import serve
serve(load(sys.argv[1]))
"""
# Writes a line into the run directory for each full collection of garbage.
COLLECTIONS = "full_collections"
COUNT_COLLECTIONS = f"""
import gc, pathlib, sys
file = pathlib.Path(sys.argv[1]).with_name({COLLECTIONS!r}).open("a", buffering=1)
gc.callbacks.append(lambda phase, info: info["generation"] == 2 and phase == "stop" and print("full", file=file))
"""


@dataclass
class Process:
    """`slipstream queue`, without the command line."""

    run_file: Path
    config: RunConfig
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, program: str = SERVE) -> None:
        self.running.append(subprocess.Popen([sys.executable, "-c", program, str(self.run_file)]))

    def end(self, number: signal.Signals) -> int:
        self.running[-1].send_signal(number)
        return self.running[-1].wait(10)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    port = free_port()
    (tmp_path / "task.py").write_text("task = None\n")
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""run = {{ dir = "{tmp_path}" }}
        model = {{ path = "tiny" }}
        task = {{ path = "task.py:task" }}
        rollout = {{ group_size = 2 }}
        queue = {{ port = {port}, ticket_timeout_s = 2 }}
        learner = {{ groups_per_step = {B} }}""".replace("\n        ", "\n")
    )
    process = Process(run_file, load(run_file))
    yield process
    for child in process.running:
        child.kill()
        child.wait()


@dataclass
class Traffic:
    """Two workers and a learner that carry on through every restart, and what they were promised.

    Tickets expire soon: those in an answer that a kill cut off come back only then."""

    client: QueueClient
    accepted: set[str] = field(default_factory=set)
    trained: list[str] = field(default_factory=list)
    at_step: asyncio.Condition = field(default_factory=asyncio.Condition)
    step: int = 0

    async def worker(self, name: str) -> None:
        while True:
            try:
                reply = await self.client.tickets(TicketRequest(name, 2, wait_s=5.0))
            except RunFinished:
                return
            for ticket in reply.tickets:
                try:
                    await self.client.submit(group(ticket, worker_id=name))
                except QueueRefused as refusal:
                    if refusal.reason != "ticket_ended":
                        raise
                else:
                    self.accepted.add(ticket.id)

    async def learner(self, session: int) -> None:
        while self.step < STEPS:
            have: list[str] = []
            while len(have) < B:
                request = LeaseRequest(session, f"lease-{self.step}", B - len(have), have, wait_s=5.0)
                reply = await self.client.lease(request)
                have += [codec.decode(bytes(data), Group).ticket_id for data in reply.groups]
            await self.client.ack("lease", LeaseAck(session, have, step=self.step + 1, version=self.step + 1))
            self.trained += have
            async with self.at_step:
                self.step += 1
                self.at_step.notify_all()
            await serve_version(self.client, self.step)
            if self.step % 7 == 0:
                await self.client.checkpointed(session, self.step)
        await self.client.finish(session)

    async def reaches(self, step: int) -> None:
        async with self.at_step:
            await self.at_step.wait_for(lambda: self.step >= step)


async def test_i1_kill_9_loses_nothing_that_was_accepted_and_trains_nothing_twice(process: Process) -> None:
    process.start()
    async with QueueClient(process.config.queue.address, patience_s=30.0) as client, asyncio.timeout(60.0):
        policy = await client.begin_session(BeginSession(0, 0, STEPS, resume=False))
        await serve_version(client, 0)
        traffic = Traffic(client)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.learner(policy.session))
            tasks.create_task(traffic.worker("a"))
            tasks.create_task(traffic.worker("b"))
            for step in (5, 15, 25):
                await traffic.reaches(step)
                assert process.end(signal.SIGKILL) == -signal.SIGKILL
                process.start()
        status = await client.status()
    assert client.retries > 0
    assert process.end(signal.SIGTERM) == 0
    rows = open_for_reading(process.config).read_ledger()
    trained = [row for row in rows if row.trained]
    assert sorted(row.ticket_id for row in trained) == sorted(traffic.trained)
    assert len({row.index for row in trained}) == len(trained) == B * STEPS
    assert Counter(row.step for row in trained) == dict.fromkeys(range(1, STEPS + 1), B)
    left = {row.ticket_id: row for row in rows if row.ticket_id in traffic.accepted and not row.trained}
    assert {row.reason for row in left.values()} <= {"run_finished"}, "an accepted group got lost"
    assert (status.version, status.finished, status.ledger.trained) == (STEPS, True, B * STEPS)


async def test_i1_rows_are_chosen_after_a_kill_as_they_would_have_been(process: Process) -> None:
    """Against the estimates of a queue that lives on."""
    text = process.run_file.read_text().replace('"task.py:task" }', '"task.py:task", order = "learnable" }')
    process.run_file.write_text(text.replace("ticket_timeout_s = 2", "ticket_timeout_s = 60, depth = 5.0"))
    data = msgspec.structs.replace(FOUND, rows=12)
    lives, drawn = RowEstimates(load(process.run_file), [], data), []
    process.start()
    async with QueueClient(process.config.queue.address, patience_s=30.0) as client, asyncio.timeout(60.0):
        await client.begin_session(BeginSession(0, 0, STEPS, resume=False, fingerprint=DECLARED))
        await serve_version(client, 0)
        for index in range(5 * B):
            if index in (6, 7, 15):
                assert process.end(signal.SIGKILL) == -signal.SIGKILL
                process.start()
            await client.heartbeat(WorkerReport("w", [], fingerprint=data))
            (ticket,) = (await client.tickets(TicketRequest("w", 1, wait_s=5.0))).tickets
            assert (ticket.index, ticket.row) == (index, lives.row_of(index))
            made = group(ticket, rewards=(0.0, float(ticket.row % 3 == 0)))
            await client.submit(made)
            lives.apply(Decision(rows=(lives.after(ticket.row, RowOutcome.of(made)),)))
            drawn.append(ticket.row)
        status = await client.status()
    assert status.rows == lives.status()
    assert drawn != [RowEstimates(load(process.run_file), [], data).row_of(index) for index in range(5 * B)]


async def test_a_restarted_queue_admits_no_more_than_the_bound(process: Process) -> None:
    # No ticket is to expire here, however slow the restart.
    process.run_file.write_text(process.run_file.read_text().replace("ticket_timeout_s = 2", "ticket_timeout_s = 60"))
    process.start()
    async with QueueClient(process.config.queue.address, patience_s=30.0) as client:
        await client.begin_session(BeginSession(0, 0, STEPS, resume=False))
        await serve_version(client, 0)
        before = (await client.tickets(TicketRequest("w", 100, wait_s=0.0))).tickets
        await client.submit(group(before[0]))
        process.end(signal.SIGKILL)
        process.start()
        assert (await client.tickets(TicketRequest("w", 100, wait_s=0.0))).tickets == []
        status = await client.status()
        assert (status.groups.outstanding, status.groups.ready, status.served_version) == (len(before), 1, 0)
        assert [(s.name, s.state) for s in status.servers] == [(SERVER, ServerState.SERVING)]
        url = status.servers[0].url
        assert (
            await client.put_server(Server(SERVER, url, ServerState.SERVING, 0), status.learner.session)
        ).version == 0
        again = await client.lease(LeaseRequest(status.learner.session, "l", 5, wait_s=0.0))
        assert [codec.decode(bytes(data), Group).ticket_id for data in again.groups] == ["0.0"]


async def test_a_signal_ends_the_queue_although_clients_wait(process: Process) -> None:
    process.start()
    async with QueueClient(process.config.queue.address, patience_s=20.0) as client:
        session = (await client.begin_session(BeginSession(0, 0, STEPS, resume=False))).session
        polls = [
            asyncio.create_task(client.tickets(TicketRequest("w", 1, wait_s=60.0))),
            asyncio.create_task(client.lease(LeaseRequest(session, "l", 1, wait_s=60.0))),
        ]
        while len((await client.status()).waits) < 2:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)
        started = time.monotonic()
        assert await asyncio.to_thread(process.end, signal.SIGINT) == 0
        assert time.monotonic() - started < 30.0, "the polls of 60 s were waited for"
        tickets, groups = await asyncio.gather(*polls)
        assert tickets.tickets == groups.groups == []


async def test_a_signal_ends_a_queue_that_finds_another_in_its_place(process: Process) -> None:
    """Both were waiting when it continued after a stop. It stood by, and was to be killed."""
    process.start()
    async with QueueClient(process.config.queue.address, patience_s=30.0) as client:
        await client.position()
    queue = process.running[-1]
    queue.send_signal(signal.SIGSTOP)
    with contextlib.closing(sqlite3.connect(process.config.run_dir / FILE_NAME, timeout=5.0)) as db, db:
        db.execute("UPDATE owner SET epoch = epoch + 1")
    await asyncio.sleep(2 * ALIVE_S)  # its next commit is due
    queue.send_signal(signal.SIGTERM)
    assert process.end(signal.SIGCONT) == 0


async def test_a_fleet_that_waits_causes_no_full_collection(process: Process) -> None:
    """The loop stands still for each: for a third of a second with 2,000 workers, every few seconds."""
    raise_descriptors()
    process.start(COUNT_COLLECTIONS + SERVE)
    counted = process.run_file.with_name(COLLECTIONS)
    async with QueueClient(process.config.queue.address, patience_s=30.0) as client, asyncio.timeout(120.0):
        await client.position()
        before = counted.read_text()
        polls = [
            asyncio.create_task(client.tickets(TicketRequest(f"w-{number}", 1, wait_s=120.0)))
            for number in range(FLEET)
        ]
        while len((await client.status()).workers) < FLEET:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.2)
        assert counted.read_text() == before
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


def test_bad_input_a_taken_port_is_named(process: Process) -> None:
    with listen("127.0.0.1", process.config.queue.port), pytest.raises(ConfigError) as error:
        serve(process.config)
    assert f"queue.port = {process.config.queue.port}" in str(error.value)
    assert "choose another queue.port" in str(error.value)
    assert not process.config.run_dir.exists()
