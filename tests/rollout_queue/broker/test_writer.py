"""Decisions are committed in groups, and nobody is told of one before the store has it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from slipstream.protocol import reasons
from slipstream.rollout_queue.broker import lifecycle
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.clock import Clock
from slipstream.rollout_queue.broker.lifecycle import ALIVE_S
from slipstream.rollout_queue.broker.writer import Writer
from slipstream.rollout_queue.ledger.records import Decision, Refusal, RunState, TicketRecord
from slipstream.rollout_queue.store.base import StoreError
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config
from tests.kit.broker import draw, running
from tests.kit.queue import FakeTime, until


class SlowStore(SqliteStore):
    """Holds each commit until it is let go, or fails it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.commits: list[list[str]] = []
        self.error: Exception | None = None

    def commit_at_once(self, changes: Changes) -> bool:
        return False

    def commit(self, changes: Changes) -> None:
        if not changes.tickets:
            super().commit(changes)
            return
        self.begun.release()
        assert self.go.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        super().commit(changes)
        self.commits.append(list(changes.tickets))


def ticket(index: int) -> Decision:
    return Decision((TicketRecord(index, 0, index, "w", 0),))


@pytest.fixture
def store(tmp_path: Any) -> SlowStore:
    store = SlowStore(tmp_path / "queue.db")
    store.acquire()
    return store


async def test_what_comes_while_one_is_written_goes_together_with_the_next(store: SlowStore) -> None:
    writer = Writer(store, lambda _: None, lambda *_: None)
    told: list[int] = []

    async def tell(index: int) -> None:
        await writer.add(ticket(index), {})
        told.append(index)

    first = asyncio.create_task(tell(0))
    await until(lambda: store.begun.acquire(blocking=False))
    others = [asyncio.create_task(tell(index)) for index in range(1, 50)]
    await asyncio.sleep(0.05)
    assert told == []
    store.go.release()
    await first
    await asyncio.sleep(0.05)
    assert told == [0], "some were told of what is not in the store"
    store.go.release()
    await asyncio.gather(*others)
    assert store.commits == [["0.0"], [f"{index}.0" for index in range(1, 50)]]
    writer.close()


async def test_a_commit_that_fails_is_told_to_all_whose_decisions_it_held_and_to_those_after(store: SlowStore) -> None:
    failures: list[Exception] = []
    writer = Writer(store, failures.append, lambda *_: None)
    waiting = [asyncio.ensure_future(awaited(writer.add(ticket(0), {})))]
    await until(lambda: store.begun.acquire(blocking=False))
    waiting += [asyncio.ensure_future(awaited(writer.add(ticket(index), {}))) for index in (1, 2)]
    store.error = StoreError("disk full")
    store.go.release()
    assert await asyncio.gather(*waiting) == [reasons.STORE_FAILED] * 3
    for later in (lambda: writer.add(ticket(3), {}), lambda: asyncio.ensure_future(writer.call(store.load))):
        with pytest.raises(Refusal, match="disk full"):
            await later()  # type: ignore[misc]
    assert [str(error) for error in failures] == ["disk full"]
    writer.close()


class BriefStore(MemoryStore):
    """Notes in which thread a commit is made; each kind of commit lasts as long as it is told."""

    blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.seconds = {False: 0.0, True: 0.0}
        self.error: Exception | None = None

    def commit(self, changes: Changes) -> None:
        if self.error is not None:
            raise self.error
        self.threads.append("store" if threading.current_thread().name == "store" else "loop")
        time.sleep(self.seconds[changes.run is not None])
        super().commit(changes)

    def kept(self) -> list[str]:
        """Return the tickets and forget in which threads they came."""
        self.threads.clear()
        return sorted(self._tickets)


@pytest.fixture
def brief_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Commits shorter than this are brief: so long that a busy machine makes none of them look slow."""
    monkeypatch.setattr("slipstream.rollout_queue.broker.writer.BRIEF_S", 0.3)
    return 0.3


async def test_commits_are_made_on_the_loop_as_long_as_those_of_their_kind_are_brief(brief_s: float) -> None:
    store = BriefStore()
    writer = Writer(store, lambda _: None, lambda *_: None)
    step = Decision(run=RunState(step=1))
    for decision in (ticket(0), step, ticket(1), step):
        await writer.add(decision, {})
    assert store.threads == ["loop"] * 4
    store.kept()
    store.seconds[True] = 1.2 * brief_s
    for decision in (step, ticket(2), step, ticket(3)):
        await writer.add(decision, {})
    assert store.threads == ["loop", "loop", "store", "loop"], "a slow disk is waited for in the thread"
    store.kept()
    store.seconds[True] = 0.0
    for _ in range(3):
        await writer.add(step, {})
    assert store.threads == ["store", "loop", "loop"], "once it is quick again, it is not"
    assert store.kept() == [f"{index}.0" for index in range(4)]
    writer.close()


@pytest.mark.usefixtures("brief_s")
async def test_no_commit_is_made_on_the_loop_while_the_thread_uses_the_store() -> None:
    """They share one connection, and one transaction."""
    store = BriefStore()
    writer = Writer(store, lambda _: None, lambda *_: None)
    begun, go = threading.Event(), threading.Event()

    def read() -> int:
        begun.set()
        assert go.wait(20)
        return len(store.threads)

    reading = asyncio.ensure_future(writer.call(read))
    await until(begun.is_set)
    commits = [writer.add(ticket(index), {}) for index in range(3)]
    await asyncio.sleep(0.05)
    assert store.threads == []
    go.set()
    for commit in commits:
        await commit
    assert (await reading, store.threads) == (0, ["store"]), "they go together, and after it"
    await writer.add(ticket(3), {})
    assert store.threads == ["store", "loop"]
    writer.close()


async def test_the_loop_runs_on_while_another_program_has_the_file_locked(tmp_path: Any) -> None:
    store = SqliteStore(tmp_path / "queue.db")
    store.acquire()
    writer = Writer(store, lambda _: None, lambda *_: None)
    await writer.add(ticket(0), {})
    with closing(sqlite3.connect(tmp_path / "queue.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        commits = [writer.add(ticket(1), {})]
        await asyncio.sleep(0.05)
        commits.append(writer.add(ticket(2), {}))
        assert not any(commit.has_ended for commit in commits)
        other.execute("ROLLBACK")
    for commit in commits:
        await commit
    assert set(store.records(["0.0", "1.0", "2.0"])) == {"0.0", "1.0", "2.0"}
    writer.close()


async def test_a_commit_that_fails_on_the_loop_is_told_as_any_other() -> None:
    store, failures = BriefStore(), list[Exception]()
    writer = Writer(store, failures.append, lambda *_: None)
    store.error = StoreError("disk full")
    waiting = [awaited(writer.add(ticket(index), {})) for index in range(3)]
    async with asyncio.timeout(10):
        assert await asyncio.gather(*waiting) == [reasons.STORE_FAILED] * 3
    with pytest.raises(Refusal, match="disk full"):
        writer.add(ticket(3), {})
    assert [str(error) for error in failures] == ["disk full"]
    writer.close()


async def test_a_commit_that_fails_at_once_leaves_nobody_waiting() -> None:
    """The queue never ended: at its end it waits for what was added."""

    class Failing(MemoryStore):
        def commit(self, changes: Changes) -> None:
            raise StoreError("no memory")

    writer = Writer(Failing(), lambda _: None, lambda *_: None)
    for _ in range(2):
        with pytest.raises(Refusal, match="no memory"):
            writer.add(ticket(0), {})
    async with asyncio.timeout(10):
        assert await awaited(writer.flushed()) == reasons.STORE_FAILED
    writer.close()


async def test_a_task_of_the_queue_that_fails_ends_it() -> None:
    """Without its deadlines it would continue answering, and nobody would notice."""
    time, ended = FakeTime(), asyncio.Event()

    def monotonic() -> float:
        if time.now < 0:
            raise ValueError("the clock broke")
        return time.now

    broker = Broker(config(), MemoryStore(), Clock(monotonic, lambda: 0.0))
    broker.on_failure = ended.set
    async with lifecycle.running(broker):
        time.now = -1.0
        async with asyncio.timeout(10):
            await ended.wait()
        with pytest.raises(Refusal, match="the clock broke"):
            broker.check_ready()


async def test_a_queue_whose_store_failed_ends_without_another_error(
    store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its last requests were answered, what shows that it lives failed too."""
    monkeypatch.setattr(lifecycle, "ALIVE_S", 0.01)
    broker = Broker(config(), store, FakeTime().clock())
    async with lifecycle.running(broker):
        store.error = StoreError("disk full")
        store.go.release(100)
        with pytest.raises(Refusal, match="disk full"):
            await broker.apply(ticket(0))
        await asyncio.sleep(0.1)  # several times as long as it takes
    assert str(broker.failure) == "disk full"


async def awaited(commit: Any) -> str | None:
    try:
        await commit
    except Refusal as refusal:
        return refusal.reason
    return None


async def test_a_ticket_is_given_only_once_it_is_in_the_store_though_it_counts_at_once(store: SlowStore) -> None:
    """A worker whose answer is still to come holds its permit: it is not given twice."""
    store.go.release(100)  # the servers of the run file, and the session
    async with running(store) as broker:
        while store.go.acquire(blocking=False):
            pass
        while store.begun.acquire(blocking=False):
            pass
        asked = asyncio.create_task(draw(broker))
        await until(lambda: store.begun.acquire(blocking=False))
        await asyncio.sleep(0.05)
        assert not asked.done()
        assert broker.ledger.issued == 1
        store.go.release(100)
        assert [ticket.id for ticket in await asked] == ["0.0"]
        assert store.records(["0.0"]).keys() == {"0.0"}


async def test_a_broker_whose_store_fails_while_requests_run_ends_in_order(store: SlowStore) -> None:
    store.error = StoreError("disk full")
    store.go.release(100)
    broker = Broker(config(), store, FakeTime().clock())
    async with lifecycle.running(broker):
        with pytest.raises(Refusal, match="disk full"):
            await broker.apply(ticket(0))
        await asyncio.sleep(3 * ALIVE_S)  # requests that were under way may take as long
        broker.close_waits()
    assert str(broker.failure) == "disk full"
