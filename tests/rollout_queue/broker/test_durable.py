"""Nobody is told what a crash would take back, nor what another queue has changed since, whatever is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.protocol import access, codec, reasons
from slipstream.protocol.client import QueueClient, QueueError, Unreachable
from slipstream.protocol.messages import (
    BeginSession,
    Fingerprint,
    LeaseAck,
    LeaseRenewal,
    LeaseRequest,
    Server,
    ServerChange,
    ServerState,
    TicketFailure,
    TicketRequest,
    WorkerReport,
)
from slipstream.protocol.status import EvaluationRequest
from slipstream.rollout_queue.broker import broker as broker_module
from slipstream.rollout_queue.broker import learner, lifecycle, workers
from slipstream.rollout_queue.broker import writer as writer_module
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger.records import Decision, Refusal, TicketState
from slipstream.rollout_queue.store.base import Superseded
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config, group
from tests.kit.messages import SERVER
from tests.kit.queue import FakeTime, serving
from tests.rollout_queue.broker.test_operations import URL, stays, submit
from tests.rollout_queue.broker.test_writer import until

DECLARED = Fingerprint("1", "t", "c", {})
FOUND = msgspec.structs.replace(DECLARED, rows=9, data="d", eval_rows=1, eval_data="e")
FREE = 1000


class HeldStore(SqliteStore):
    """Holds each commit that changes something until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def commit_at_once(self, changes: Changes) -> bool:
        return False

    def commit(self, changes: Changes) -> None:
        if changes != Changes():
            self.begun.release()
            assert self.go.acquire(timeout=20)
        super().commit(changes)


@asynccontextmanager
async def running(path: Path, time: FakeTime | None = None) -> AsyncIterator[tuple[Broker, HeldStore]]:
    """A broker with a session, a serving server and worker w; its store holds commits once `held` was called."""
    store = HeldStore(path / "queue.db")
    broker = Broker(config(eval={"every": 1, "share": 1.0}), store, (time or FakeTime()).clock())
    store.go.release(FREE)
    async with lifecycle.running(broker):
        await learner.command(broker, BeginSession(0, 0, 100, resume=False, fingerprint=DECLARED))
        for state, version in ((ServerState.JOINING, None), (ServerState.SYNCING, None), (ServerState.SERVING, 0)):
            await learner.put_server(broker, ServerChange(Server(SERVER, URL, state, version), 1))
        await workers.heartbeat(broker, WorkerReport("w", [], capacity=8, fingerprint=FOUND))
        try:
            yield broker, store
        finally:
            store.go.release(FREE)
            broker.close_waits()


def hold(store: HeldStore) -> None:
    while store.go.acquire(blocking=False):
        pass
    while store.begun.acquire(blocking=False):
        pass


async def draw(broker: Broker, **fields: Any) -> Any:
    return await workers.draw_tickets(broker, TicketRequest("w", 1, **{"wait_s": 0.0, **fields}), stays)


async def lease(broker: Broker) -> Any:
    return await learner.lease(broker, LeaseRequest(1, "l", 8, wait_s=0.0), stays)


async def beat(broker: Broker, *ticket_ids: str) -> Any:
    return await workers.heartbeat(broker, WorkerReport("w", list(ticket_ids), capacity=8, fingerprint=FOUND))


async def evaluate(broker: Broker) -> Any:
    request = EvaluationRequest(1, 0, 0, rows=1, group_size=1, temperature=None, timeout_s=1000.0)
    return await learner.ask_for_evaluation(broker, request)


Step = Callable[[Broker, Any], Awaitable[Any]]

# What is done first, what is decided then and not in the store yet, and who asks meanwhile.
CASES: dict[str, tuple[Step, Step, Step]] = {
    "tickets whose answer was lost": (
        lambda broker, _: asyncio.sleep(0),
        lambda broker, _: draw(broker),
        lambda broker, _: draw(broker, have=[]),
    ),
    "groups whose answer was lost": (
        lambda broker, ticket: submit(broker, ticket),
        lambda broker, _: lease(broker),
        lambda broker, _: lease(broker),
    ),
    "that a ticket has ended": (
        lambda broker, _: asyncio.sleep(0),
        lambda broker, ticket: workers.fail_ticket(broker, ticket.id, TicketFailure("w", "test")),
        lambda broker, ticket: workers.fail_ticket(broker, ticket.id, TicketFailure("w", "test")),
    ),
    "that a ticket is lost": (
        lambda broker, _: asyncio.sleep(0),
        lambda broker, ticket: workers.fail_ticket(broker, ticket.id, TicketFailure("w", "test")),
        lambda broker, ticket: beat(broker, ticket.id),
    ),
    "the servers": (
        lambda broker, _: asyncio.sleep(0),
        lambda broker, _: learner.put_server(broker, ServerChange(Server(SERVER, URL, ServerState.DOWN), 1)),
        lambda broker, _: learner.read_servers(broker),
    ),
    "that a server is as it was asked to be": (
        lambda broker, _: asyncio.sleep(0),
        lambda broker, _: learner.put_server(broker, ServerChange(Server(SERVER, URL, ServerState.DOWN), 1)),
        lambda broker, _: learner.put_server(broker, ServerChange(Server(SERVER, URL, ServerState.DOWN), 1)),
    ),
    "the position": (
        lambda broker, ticket: submit(broker, ticket),
        lambda broker, ticket: learner.acknowledge(broker, "l", LeaseAck(1, [ticket.id], step=1, version=1)),
        lambda broker, _: learner.read_position(broker),
    ),
    "the evaluations": (
        lambda broker, _: asyncio.sleep(0),
        lambda broker, _: evaluate(broker),
        lambda broker, _: learner.read_evaluations(broker, 0.0),
    ),
    "that a lease has lapsed": (
        lambda broker, ticket: submit(broker, ticket),
        lambda broker, _: lease(broker),
        lambda broker, _: learner.renew_lease(broker, "l", LeaseRenewal(1, ["7.0"])),
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_nobody_is_told_what_is_not_in_the_store(case: str, tmp_path: Path) -> None:
    before, decide, ask = CASES[case]
    async with running(tmp_path) as (broker, store):
        reply = await draw(broker)
        (ticket,) = reply.tickets
        await before(broker, ticket)
        hold(store)
        deciding = asyncio.ensure_future(decide(broker, ticket))
        await until(lambda: store.begun.acquire(blocking=False))
        asking = asyncio.ensure_future(ask(broker, ticket))
        await asyncio.sleep(0.05)
        assert not asking.done()
        assert not deciding.done()
        store.go.release(FREE)
        await asyncio.gather(deciding, asking)


async def test_an_evaluation_has_not_ended_for_the_learner_before_the_store_knows_its_result(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, store):
        await evaluate(broker)
        (ticket,) = (await draw(broker)).tickets
        assert ticket.kind == "eval"

        async def body() -> bytes:
            return codec.encode(group(ticket, rewards=[1.0]))

        hold(store)
        reading = asyncio.create_task(learner.read_evaluations(broker, 30.0))
        await asyncio.sleep(0)
        accepting = asyncio.create_task(workers.submit_group(broker, ticket.id, body))
        await until(lambda: store.begun.acquire(blocking=False))
        await asyncio.sleep(0.05)
        assert not reading.done()
        store.go.release(FREE)
        assert await accepting
        (ended,) = await reading
        assert ended.ended == "complete"


async def test_tickets_of_an_evaluation_that_ends_before_they_are_in_the_store_are_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, store):
        await evaluate(broker)
        hold(store)
        drawing = asyncio.create_task(draw(broker))
        await until(lambda: store.begun.acquire(blocking=False))
        (of,) = broker.ledger.evaluations.open
        ends = msgspec.structs.replace(of.record, result=of.tally.evaluation(of.record, 1.0, "deadline"))
        broker.apply(Decision(evaluations=(ends,)))
        store.go.release(FREE)
        reply = await drawing
        assert [ticket.kind for ticket in reply.tickets] == ["eval"]


async def test_what_clients_renew_counts_though_the_store_does_not_answer(tmp_path: Path) -> None:
    time = FakeTime()
    async with running(tmp_path, time) as (broker, store):
        (ready,) = (await draw(broker)).tickets
        await submit(broker, ready)
        await lease(broker)
        (held,) = (await draw(broker)).tickets
        hold(store)
        deciding = asyncio.ensure_future(draw(broker, have=[held.id]))
        await until(lambda: store.begun.acquire(blocking=False))
        most_s = 0.9 * min(broker.config.queue.ticket_timeout_s, broker.config.queue.lease_timeout_s)
        time.now += most_s
        renewing = asyncio.gather(beat(broker, held.id), learner.renew_lease(broker, "l", LeaseRenewal(1)))
        await asyncio.sleep(0.05)
        assert not renewing.done()
        time.now += most_s
        store.go.release(FREE)
        await asyncio.gather(deciding, renewing)
        await broker.expire()
        assert broker.ledger.get(held.id, TicketState.ISSUED)
        assert broker.ledger.get(ready.id, TicketState.LEASED)


Call = Callable[[QueueClient], Awaitable[Any]]

# What is decided and not in the store yet, and who is refused because of it.
REFUSED: dict[str, tuple[Call, Call, str]] = {
    "that the run is finished": (
        lambda client: client.finish(1),
        lambda client: client.tickets(TicketRequest("w", 1, wait_s=0.0)),
        "the run is finished",
    ),
    "that its session is superseded": (
        lambda client: client.begin_session(BeginSession(0, 0, 100, resume=True)),
        lambda client: client.ack("l", LeaseAck(1)),
        reasons.SESSION_SUPERSEDED,
    ),
    "that its session is superseded, by FastAPI": (
        lambda client: client.begin_session(BeginSession(0, 0, 100, resume=True)),
        lambda client: client.release("l", 1),
        reasons.SESSION_SUPERSEDED,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_nobody_is_refused_for_what_is_not_in_the_store(case: str, tmp_path: Path) -> None:
    decide, ask, why = REFUSED[case]
    store = HeldStore(tmp_path / "queue.db")
    store.go.release(FREE)
    async with serving(config(), store) as queue, QueueClient(queue.url, patience_s=0) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False))
        hold(store)
        deciding = asyncio.ensure_future(decide(client))
        await until(lambda: store.begun.acquire(blocking=False))
        asking = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0.2)
        assert not asking.done()
        store.go.release(FREE)
        await deciding
        with pytest.raises(QueueError, match=why):
            await asking


async def test_a_queue_whose_store_is_silent_says_at_once_that_it_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever chooses which queue to ask would wait for the store, too."""
    store = HeldStore(tmp_path / "queue.db")
    store.has_standbys = True
    store.go.release(FREE)
    async with serving(config(), store) as queue, QueueClient(queue.url, patience_s=0) as client:
        hold(store)
        deciding = asyncio.ensure_future(client.begin_session(BeginSession(0, 0, 100, resume=False)))
        await until(lambda: store.begun.acquire(blocking=False))
        monkeypatch.setattr(broker_module, "MAX_SILENCE_S", -1.0)
        async with asyncio.timeout(10):
            with pytest.raises(Unreachable, match="the store has not answered for"):
                await client.call("GET", access.READY)
        assert not deciding.done()
        store.go.release(FREE)
        await deciding


class Taken(MemoryStore):
    """A store that another queue takes over."""

    taken = False

    def commit(self, changes: Changes) -> None:
        if self.taken:
            raise Superseded("another queue is the active one")
        super().commit(changes)


async def test_a_queue_that_was_stopped_asks_its_store_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another queue may have taken over meanwhile: it has given the tickets, and begun the session, that this one
    calls lost and superseded."""
    store = Taken()
    broker = Broker(config(), store, FakeTime().clock())
    async with lifecycle.running(broker):
        await beat(broker)
        store.taken = True
        assert (await beat(broker, "9.0")).lost_tickets == ["9.0"], "it has committed a moment ago"
        monkeypatch.setattr(writer_module, "MAX_SILENCE_S", -1.0)
        with pytest.raises(Refusal) as refused:
            await beat(broker, "9.0")
        assert refused.value.reason == reasons.STORE_FAILED
        assert isinstance(broker.failure, Superseded)
        broker.close_waits()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.ack("l", LeaseAck(2)),
        lambda client: client.release("l", 2),
        lambda client: client.lease(LeaseRequest(2, "l", 1, wait_s=0.0)),
        lambda client: client.tickets(TicketRequest("w", 1, wait_s=0.0)),
    ],
)
async def test_a_queue_that_was_stopped_asks_its_store_before_it_refuses(
    ask: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the session that another queue has begun, and of its workers, it knows nothing."""
    store = Taken()
    async with serving(config(), store) as queue, QueueClient(queue.url, patience_s=0) as client:
        await client.begin_session(BeginSession(0, 0, 100, resume=False, fingerprint=DECLARED))
        store.taken = True
        monkeypatch.setattr(writer_module, "MAX_SILENCE_S", -1.0)
        with pytest.raises(Unreachable, match="another queue is the active one"):
            await ask(client)
