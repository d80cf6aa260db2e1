"""What every transport must do, each against a fake vLLM with the transport's real receiving end behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server import cancellation
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import TransferError, Transport, build_transport
from slipstream.weight_sync.transports.gpu import communicator, ipc
from slipstream.weight_sync.transports.gpu.communicator import Gpu, Stream
from slipstream.weight_sync.transports.registry import TRANSPORTS
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.fake_vllm import FakeVllm, serving
from tests.kit.sync import control_calls, probe
from tests.weight_sync.receivers import GlooEnd, HttpEnd, IpcEnd, NcclEnd, NcclStagedEnd, ReceivingEnd

RECEIVERS: dict[str, type[ReceivingEnd]] = {
    "gloo": GlooEnd,
    "nccl": NcclEnd,
    "nccl_staged": NcclStagedEnd,
    "ipc": IpcEnd,
    "http": HttpEnd,
}


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Rig:
    fake: FakeVllm
    control: ServerControl
    receiver: ReceivingEnd
    section: WeightSyncSection

    async def connected(self) -> Transport:
        transport = build_transport(self.section)
        await transport.connect(self.control, 1)
        return transport

    async def publish(self, transport: Transport, sent: Snapshot) -> Pause:
        pause = Pause(self.control, clear_cache=False, resume_after_error=transport.stages)
        await transport.publish(self.control, sent, pause)
        return pause


@asynccontextmanager
async def rig(name: str, timeout_s: float = 20) -> AsyncIterator[Rig]:
    fake = FakeVllm()
    receiver = RECEIVERS[name](fake.engine)
    section = WeightSyncSection(transport=name, bucket_bytes=1024, timeout_s=timeout_s)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "own_gpu", receiver.gpu)
        patch.setattr(ipc, "export_storage", receiver.memory.export)
        patch.setattr(ipc, "open_storage", receiver.memory.opened)
        async with serving(fake) as url, ServerControl(url, timeout_s, run_id=lambda: "run-1") as control:
            yield Rig(fake, control, receiver, section)
            receiver.close()


def snapshot(version: int) -> Snapshot:
    weights = [("a", torch.full((1500,), float(version))), ("b", torch.arange(7)), ("none", torch.zeros(0))]
    return Snapshot(version, weights, probe())


def test_the_registry_holds_what_the_setting_may_be_and_each_is_tested() -> None:
    names = set(get_args(WeightSyncSection.model_fields["transport"].annotation))
    assert {"auto", *TRANSPORTS} == {"auto", *RECEIVERS} == names


async def test_each_version_arrives_whole_and_is_labelled_and_served(name: str) -> None:
    async with rig(name) as r:
        transport = await r.connected()
        for version in (1, 2):
            sent = snapshot(version)
            pause = await r.publish(transport, sent)
            weights = sent.manifest.views(sent.flat)
            assert r.receiver.loaded[-1].keys() == weights.keys()
            assert all(torch.equal(r.receiver.loaded[-1][key], weights[key]) for key in weights)
            assert r.fake.engine.weight_version == str(version)
            assert not r.fake.engine.paused
            assert pause.seconds > 0
        assert len(r.receiver.loaded) == 2
        assert r.fake.calls.count("/init_weight_transfer_engine") == 1
        await transport.close()


@pytest.mark.parametrize("name", ["nccl", "nccl_staged", "ipc"])
async def test_no_publication_takes_a_further_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has 32, and gives the next ones out again while others use them."""
    made = list[Stream]()

    def counted(of: Gpu) -> Gpu:
        def stream() -> Stream:
            made.append(of.stream())
            return made[-1]

        return replace(of, stream=stream)

    async with rig(name) as r:
        own = r.receiver.gpu
        monkeypatch.setattr(communicator, "own_gpu", lambda device=None: counted(own(device)))
        transport = await r.connected()
        await r.publish(transport, snapshot(1))
        first = len(made)
        await r.publish(transport, snapshot(2))
        assert len(made) == first > 0
        await transport.close()


async def test_i6_a_transport_that_stages_pauses_in_the_swap_alone(name: str) -> None:
    async with rig(name) as r:
        transport = await r.connected()
        await r.publish(transport, snapshot(1))
        if transport.stages:
            calls = control_calls(r.fake)
            assert calls[-2:] == ["/slipstream/staged", "/slipstream/swap"]
            assert calls.index("/start_weight_update") < calls.index("/update_weights") < len(calls) - 2
            assert "/pause" not in r.fake.calls
        await transport.close()


async def test_damaged_weights_never_reach_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(name) as r:
        transport = await r.connected()
        await r.publish(transport, snapshot(1))
        if not r.receiver.verifies:
            pytest.skip(f"vLLM's end of {name} checks no digest: the proof after it finds the damage")
        damaged = snapshot(2)
        r.receiver.damage(damaged, monkeypatch)
        with pytest.raises((TransferError, ControlError)):
            await r.publish(transport, damaged)
        assert len(r.receiver.loaded) == 1
        assert r.fake.engine.weight_version == "1"
        assert r.fake.engine.paused is not transport.stages
        await transport.close()


async def test_workers_that_stop_receiving_are_an_error_in_time_and_a_new_connection_works(name: str) -> None:
    async with rig(name, timeout_s=2) as r:
        transport = await r.connected()
        receive = dict(r.fake.engine.hooks)
        r.receiver.hang()
        began = time.monotonic()
        with pytest.raises((TransferError, ControlError)):
            await r.publish(transport, snapshot(1))
        assert time.monotonic() - began < 15
        assert r.receiver.loaded == []
        assert r.fake.engine.weight_version == "default"
        assert r.fake.engine.paused is not transport.stages
        await transport.close()

        r.fake.engine.hooks |= receive
        transport = await r.connected()
        await r.publish(transport, snapshot(2))
        assert len(r.receiver.loaded) == 1
        assert not r.fake.engine.paused
        await transport.close()


async def test_workers_that_never_come_are_an_error_in_time(name: str) -> None:
    async with rig(name, timeout_s=1) as r:
        if not r.receiver.meets:
            pytest.skip(f"nobody meets with {name}: the workers open what the learner names")
        r.fake.engine.hooks.clear()
        transport = build_transport(r.section)
        began = time.monotonic()
        with pytest.raises((TransferError, ControlError)):
            await transport.connect(r.control, 1)
        assert time.monotonic() - began < 15
        await transport.close()


async def test_a_cancellation_does_not_wait_for_a_transfer_that_hangs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "GRACE_S", 0.05)
    async with rig(name, timeout_s=5) as r:
        transport = await r.connected()
        r.receiver.hang()
        updated = asyncio.Event()
        r.fake.engine.hooks["update_weights"] = lambda update_info: updated.set()
        publishing = asyncio.create_task(r.publish(transport, snapshot(1)))
        await updated.wait()
        began = time.monotonic()
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert time.monotonic() - began < 3
        await transport.close()


async def test_to_publish_before_connecting_is_an_error_that_asks_nothing_of_the_server(name: str) -> None:
    async with rig(name) as r:
        with pytest.raises(TransferError, match="not connected"):
            await r.publish(build_transport(r.section), snapshot(1))
        assert r.fake.calls == []


async def test_to_publish_after_closing_is_an_error_that_asks_nothing_of_the_server(name: str) -> None:
    async with rig(name) as r:
        closed = await r.connected()
        await closed.close()
        r.fake.calls.clear()
        with pytest.raises(TransferError, match="not connected"):
            await r.publish(closed, snapshot(1))
        assert r.fake.calls == []


async def test_closing_twice_never_raises(name: str) -> None:
    async with rig(name) as r:
        for transport in (build_transport(r.section), await r.connected()):
            await transport.close()
            await transport.close()


async def test_what_a_learner_that_died_left_open_is_ended_by_the_next_connection(name: str) -> None:
    async with rig(name) as r:
        r.fake.engine.init_transfer()
        r.fake.engine.start_update()
        transport = await r.connected()
        await r.publish(transport, snapshot(1))
        assert r.fake.engine.weight_version == "1"
        await transport.close()
