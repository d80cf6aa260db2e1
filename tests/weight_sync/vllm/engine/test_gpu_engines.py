"""vLLM's ends of the staged transports for GPUs, driven as vLLM's worker drives them, against the learner's real ends.

CUDA, NCCL and the model are stand-ins: what runs here is the order of things and every check, not one copy on a GPU.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.protocol.engine import EngineState, Staged, Swap
from slipstream.weight_sync.server import pause
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import TransferError, Transport, build_transport
from slipstream.weight_sync.transports.gpu import communicator, ipc
from slipstream.weight_sync.transports.registry import TRANSPORTS
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.stand_in_nccl import SharedMemory, World, stand_in_gpu
from tests.kit.sync import probe


class Shadow:
    def __init__(self, model: dict[str, torch.Tensor], arrivals: Any) -> None:
        self._model = model
        self._new = arrivals.whole()

    def exchange(self) -> None:
        self._model |= self._new


class InProcess(ServerControl):
    """A server that is nothing but `engine`; answers `transport` when it is asked what it was started with."""

    def __init__(self, engine: Any, transport: str) -> None:
        super().__init__("in process", 20)
        self.engine = engine
        self.transport = transport
        self.label = "default"

    async def state(self) -> EngineState:
        return EngineState("boot", self.label, False, True, True, "none", 1, self.transport)

    async def end_transfer(self) -> None:
        await on_thread(self.engine.shutdown)

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        try:
            await on_thread(self.engine.init_transfer_engine, self.engine.parse_init_info(init_info))
        except Exception as error:
            raise ControlError(str(error)) from error

    async def start_update(self) -> None:
        self.engine.start_weight_update()

    async def update(self, update_info: dict[str, Any]) -> None:
        self.engine.update_weights(update_info)

    async def staged(self, wait_s: float) -> Staged:
        report = await on_thread(self.engine.staging, wait_s)
        return Staged(report["stage"], report["error"], report["seconds"])

    async def swap(self, label: str, clear_cache: bool) -> Swap:
        self.engine.finish_weight_update()
        self.label = label
        return Swap(0.001, 0.0005)


class Rig:
    """learner and own: uuids of the two ends' GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, learner: str, own: str) -> None:
        pytest.importorskip("vllm")
        self.world, self.memory, self.model = World(), SharedMemory(), dict[str, torch.Tensor]()
        module, _, cls = TRANSPORTS[name].engine.partition(":")
        shadow: Any = importlib.import_module("slipstream.weight_sync.vllm.engine.shadow")
        monkeypatch.setattr(shadow, "build", lambda model, config, arrivals, whole: Shadow(model, arrivals))
        monkeypatch.setattr(communicator, "own_gpu", lambda device=None: self._gpu(own if device else learner))
        monkeypatch.setattr(ipc, "export_storage", self.memory.export)
        monkeypatch.setattr(ipc, "open_storage", self.memory.opened)
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config="model config")
        backend = SimpleNamespace(backend=TRANSPORTS[name].backend or name)
        engine = getattr(importlib.import_module(module), cls)(backend, config, torch.device("cpu"), self.model)
        self.server = InProcess(engine, TRANSPORTS[name].backend or name)
        self.transports: list[Transport] = []

    def _gpu(self, uuid: str) -> communicator.Gpu:
        return stand_in_gpu(self.world, uuid)

    async def connect(self, name: str, timeout_s: float = 10, workers: int = 1) -> Transport:
        section = WeightSyncSection(transport=name, bucket_bytes=1024, timeout_s=timeout_s)  # type: ignore[arg-type]
        transport = build_transport(section)
        self.transports.append(transport)
        await transport.connect(self.server, workers)
        return transport

    async def publish(self, transport: Transport, sent: Snapshot) -> None:
        await transport.publish(self.server, sent, Pause(self.server, False, True))


def snapshot(version: int) -> Snapshot:
    return Snapshot(version, [("a", torch.full((1500,), float(version))), ("b", torch.arange(7))], probe())


UUIDS = {"nccl_staged": ("GPU-0", "GPU-1"), "ipc": ("GPU-0", "GPU-0")}


@pytest.fixture(params=UUIDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def rig(name: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    rig = Rig(monkeypatch, name, *UUIDS[name])
    yield rig
    for transport in rig.transports:
        await transport.close()
    rig.server.engine.shutdown()


async def test_the_model_is_touched_by_the_swap_alone_and_gets_what_was_sent(rig: Rig, name: str) -> None:
    transport = await rig.connect(name)
    for version in (1, 2):
        await rig.publish(transport, snapshot(version))
        assert rig.model["a"].tolist() == [version] * 1500
        assert rig.server.label == str(version)


async def test_staging_is_two_buckets_in_the_same_memory_at_every_update(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[tuple[int, int]] = set()
    views = Manifest.views

    def watched(manifest: Manifest, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        taken.add((flat.data_ptr(), len(flat)))
        return views(manifest, flat)

    transport = await rig.connect(name)
    sent = [Snapshot(version, [(f"w{i}", torch.randn(200)) for i in range(40)], probe()) for version in (1, 2)]
    monkeypatch.setattr(Manifest, "views", watched)
    for one in sent:
        await rig.publish(transport, one)
    assert len({address for address, _ in taken}) == 2
    assert max(size for _, size in taken) <= 1024
    assert sent[0].manifest.total_bytes() > 30 * 1024
    if name == "ipc":
        assert rig.memory.opened_times == 1, "each opening counts at the learner, which exports its memory once"


async def test_bytes_that_arrive_damaged_never_reach_the_model(
    rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = await rig.connect(name)
    await rig.publish(transport, snapshot(1))
    rig.world.damaged = 1
    rig.memory.damage_next(monkeypatch)
    with pytest.raises(TransferError, match="checksum"):
        await rig.publish(transport, snapshot(2))
    assert rig.model["a"].tolist() == [1] * 1500
    assert rig.server.label == "1"


async def test_auto_takes_what_the_server_was_started_with(rig: Rig, name: str) -> None:
    transport = await rig.connect("auto")
    await rig.publish(transport, snapshot(3))
    assert rig.server.label == "3"


@pytest.mark.parametrize(
    ("name", "learner", "own", "remedy"),
    [
        ("ipc", "GPU-0", "GPU-1", "weight_sync.transport = nccl_staged"),
        ("nccl_staged", "GPU-0", "GPU-0", "weight_sync.transport = ipc"),
    ],
)
async def test_ends_that_lie_wrong_for_a_transport_are_told_which_one_is_right(
    name: str, learner: str, own: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(monkeypatch, name, learner, own)
    async with asyncio.timeout(5):
        with pytest.raises((ControlError, TransferError), match=remedy):
            await rig.connect(name)


async def test_ipc_refuses_a_server_of_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "ipc", "GPU-0", "GPU-0")
    with pytest.raises(TransferError, match=r"has 2 workers.*nccl_staged"):
        await rig.connect("ipc", workers=2)


@pytest.mark.parametrize(
    ("found", "what"), [("sparse_nccl", "does not know"), ("nccl", "weight_sync.transport = nccl")]
)
async def test_auto_refuses_what_it_would_not_choose(found: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "ipc", "GPU-0", "GPU-0")
    rig.server.transport = found
    with pytest.raises(TransferError, match=what):
        await rig.connect("auto")


async def test_a_worker_that_fails_while_others_receive_ends_the_sending_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """trl#6797: what was refused before the first collective is not waited for in it."""
    rig = Rig(monkeypatch, "nccl_staged", "GPU-0", "GPU-1")
    transport = await rig.connect("nccl_staged", timeout_s=60)

    def fails(update_info: Any) -> dict[str, torch.Tensor]:
        raise ValueError("no room")

    monkeypatch.setattr(rig.server.engine._receivers[0], "receive", fails)
    async with asyncio.timeout(10):
        with pytest.raises(TransferError, match="no room"):
            await rig.publish(transport, snapshot(1))
    assert 0 in rig.world.aborted
    assert rig.model == {}


async def test_i6_the_pause_of_a_transport_in_place_is_a_lease_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leasing(ServerControl):
        leases = 0

        async def pause(self, clear_cache: bool) -> None: ...

        async def resume(self) -> None: ...

        async def lease(self, seconds: float, owner: str = "") -> None:
            self.leases += 1
            if self.leases == 2:
                raise ControlError("busy")

    monkeypatch.setattr(pause, "LEASE_S", 0.03)
    server = Leasing("in process", 1)
    async with pause.Pause(server, clear_cache=False, resume_after_error=False).held():
        await asyncio.sleep(0.1)
    assert server.leases > 3
    seen = server.leases
    await asyncio.sleep(0.05)
    assert server.leases == seen
