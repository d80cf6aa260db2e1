"""How a queue starts and stands by."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.protocol import history, reasons
from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.broker import lifecycle
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.clock import AwakeClock, Clock
from slipstream.rollout_queue.ledger import server_registry
from slipstream.rollout_queue.ledger.records import Refusal
from slipstream.rollout_queue.store.memory import MemoryStore
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


async def test_the_history_of_a_run_has_the_status_with_which_its_queue_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_LOOK_S", 0.001)
    settings = config(run={"dir": tmp_path})
    settings.run_dir.mkdir()
    broker = Broker(settings, MemoryStore(), FakeTime().clock())
    async with lifecycle.running(broker):
        await until(lambda: history.newest_status(settings.run_dir / history.FOLDER) is not None)
        broker.observations.rejections["late"] += 1
    newest = history.newest_status(settings.run_dir / history.FOLDER)
    assert newest is not None
    assert newest[1].rejections == {"late": 1}
