"""How a queue starts and stands by."""

from __future__ import annotations

import asyncio

import pytest

from protocol import reasons
from protocol.config import ConfigError
from rollout_queue.broker import lifecycle
from rollout_queue.broker.broker import Broker
from rollout_queue.broker.clock import AwakeClock, Clock
from rollout_queue.ledger import server_registry
from rollout_queue.ledger.records import Refusal
from rollout_queue.store.memory import MemoryStore
from tests.kit import config
from tests.kit.queue import FakeTime
from tests.rollout_queue.broker.test_writer import until


class AnothersStore(MemoryStore):
    """A store on which another queue is active until `free`."""

    free = False

    def acquire(self) -> str | None:
        return None if self.free else "http://other:8200"


async def test_the_clock_counts_the_time_in_which_a_queue_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is read all the while, that time looks like one in which the process was stopped."""
    for name in ("TICK_S", "ALIVE_S"):
        monkeypatch.setattr(lifecycle, name, 0.001)
    time = FakeTime()

    def passes() -> float:
        time.now += 0.9
        return time.now

    clock, store = AwakeClock(passes), AnothersStore()
    broker = Broker(config(), store, Clock(clock, lambda: 0.0))
    async with lifecycle.running(broker):
        with pytest.raises(Refusal) as refused:
            broker.check_ready()
        assert refused.value.reason == reasons.STANDS_BY
        began = time.now
        await until(lambda: time.now > began + 60.0)
        store.free = True
        await until(lambda: broker.ready)
        assert broker.now - broker.observations.started > 60.0
        assert clock.overslept_s == 0.0


async def test_servers_of_the_run_file_that_find_no_room_keep_a_queue_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_registry, "_MAX_SERVERS", 1)
    urls = ["http://a:8100", "http://b:8100"]
    broker = Broker(config(vllm={"servers": urls}), MemoryStore(), FakeTime().clock())
    async with asyncio.timeout(10), lifecycle.running(broker):
        assert isinstance(broker.failure, ConfigError)
        assert str(broker.failure).startswith("vllm.servers: server vllm-1 at http://b:8100 is refused: 1 servers are")
