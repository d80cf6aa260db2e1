"""The time that a leaving server has goes by the clock that does not jump."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.protocol.messages import BeginSession, Server, ServerChange, ServerState, WorkerReport
from slipstream.rollout_queue.broker import learner, lifecycle, workers
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.clock import Clock
from slipstream.rollout_queue.store.memory import MemoryStore
from slipstream.rollout_queue.store.sqlite import SqliteStore
from tests.kit import config
from tests.kit.messages import SERVER

DRAIN_S = 100.0
CONFIG = config(vllm={"drain_timeout_s": DRAIN_S})


class TwoClocks:
    """A monotonic clock and a wall clock, seconds."""

    def __init__(self) -> None:
        self.monotonic, self.wall = 1000.0, 1_700_000_000.0

    def clock(self) -> Clock:
        return Clock(lambda: self.monotonic, lambda: self.wall)


async def look(broker: Broker) -> list[ServerState]:
    """A worker that uses the server is heard from, and the queue looks for servers whose time is over."""
    await workers.heartbeat(broker, WorkerReport("w", [], draining={SERVER: 1}))
    await broker.remove_drained()
    return [server.state for server in broker.fleet.servers]


@pytest.mark.parametrize("jump_s", [1e6, -1e6])
async def test_a_wall_clock_that_jumps_neither_ends_nor_stretches_a_drain_and_a_restart_begins_it_anew(
    tmp_path: Path, jump_s: float
) -> None:
    time, path = TwoClocks(), tmp_path / "queue.db"
    one = Broker(CONFIG, SqliteStore(path), time.clock())
    async with lifecycle.running(one):
        await learner.command(one, BeginSession(0, 0, 100, resume=False))
        for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
            await learner.put_server(one, ServerChange(Server(SERVER, "http://127.0.0.1:8100", state, 0), 1))
        await workers.heartbeat(one, WorkerReport("w", [], draining={SERVER: 1}))
        await learner.remove_server(one, SERVER, now=False)
        time.wall += jump_s
        time.monotonic += DRAIN_S - 1.0
        assert await look(one) == [ServerState.DRAINING]
        one.close_waits()
    two = Broker(CONFIG, SqliteStore(path), time.clock())
    async with lifecycle.running(two):
        time.wall += jump_s
        time.monotonic += DRAIN_S - 1.0
        assert await look(two) == [ServerState.DRAINING], "it has its full time again"
        time.wall -= 3 * jump_s
        time.monotonic += 1.0
        assert await look(two) == []
        two.close_waits()


async def test_a_server_that_comes_back_and_leaves_again_has_its_full_time() -> None:
    time = TwoClocks()
    broker = Broker(CONFIG, MemoryStore(), time.clock())
    async with lifecycle.running(broker):
        await learner.command(broker, BeginSession(0, 0, 100, resume=False))
        for _ in range(2):
            for state in (ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING):
                await learner.put_server(broker, ServerChange(Server(SERVER, "http://127.0.0.1:8100", state, 0), 1))
            await workers.heartbeat(broker, WorkerReport("w", [], draining={SERVER: 1}))
            await learner.remove_server(broker, SERVER, now=False)
            time.monotonic += DRAIN_S - 1.0
            assert await look(broker) == [ServerState.DRAINING]
            await learner.remove_server(broker, SERVER, now=True)
        broker.close_waits()


async def test_a_server_is_not_removed_between_anothers_decision_and_its_application() -> None:
    """An acknowledgement writes the run's record in between, and holds the lock."""
    broker = Broker(CONFIG, MemoryStore(), TwoClocks().clock())
    async with lifecycle.running(broker):
        await learner.command(broker, BeginSession(0, 0, 100, resume=False))
        await learner.put_server(broker, ServerChange(Server(SERVER, "http://127.0.0.1:8100"), 1))
        await workers.heartbeat(broker, WorkerReport("w", [], draining={SERVER: 1}))
        await learner.remove_server(broker, SERVER, now=False)
        async with broker.lock:
            leaving = asyncio.create_task(workers.sign_off(broker, "w"))
            await asyncio.sleep(0.05)
            assert [server.state for server in broker.fleet.servers] == [ServerState.DRAINING]
        await leaving
        assert broker.fleet.servers == []
        broker.close_waits()
