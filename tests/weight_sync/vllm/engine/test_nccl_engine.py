"""Our form of vLLM's NCCL engine, driven as vLLM's worker drives it, against the learner's end: the order of its calls,
its wire, and the account that it keeps of what is loaded. NCCL itself and CUDA's streams are stand-ins, since neither
is to be had without a GPU."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.engine import ControlError
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.gpu import communicator
from slipstream.weight_sync.transports.gpu.nccl_sender import NcclTransport
from slipstream.weight_sync.vllm.engine.fingerprints import Difference, compare, held
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.stand_in_nccl import Blocking, World, stand_in_gpu
from tests.kit.sync import probe


class Loads(torch.nn.Module):
    """In the place of vLLM's model. `a.weight` is a parameter as it stands; `spoil`: what happens to it in the load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        self.a = torch.nn.Linear(3, 1500, bias=False, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.zeros(7))
        self.register_buffer("steps", torch.tensor(0))
        self.spoil: Callable[[torch.Tensor], Any] | None = None

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in weights}
        weight = self.loaded.get("a.weight")
        if weight is not None and weight.shape == self.a.weight.shape:
            self.a.weight.data = weight.clone()
            if self.spoil is not None:
                self.spoil(self.a.weight.data)

    @property
    def wrong(self) -> list[str]:
        return self.difference.wrong

    @property
    def difference(self) -> Difference:
        return compare(self.engine.proven, held(self))

    engine: Any = None


class InProcess(ServerControl):
    """A server that is nothing but `engines`, one a worker; each call runs as vLLM's engine loop runs it."""

    def __init__(self, engines: list[Any]) -> None:
        super().__init__("in process", 20)
        self.calls: list[str] = []
        self._engines = engines

    async def _all(self, name: str, work: Callable[[Any], None]) -> None:
        self.calls.append(name)
        try:
            await asyncio.gather(*(on_thread(work, engine) for engine in self._engines))
        except Exception as error:
            raise ControlError(str(error)) from error

    async def end_transfer(self) -> None:
        await self._all("shutdown", lambda engine: engine.shutdown())

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        await self._all("init", lambda engine: engine.init_transfer_engine(engine.parse_init_info(init_info)))

    async def start_update(self) -> None:
        await self._all("start", lambda engine: engine.start_weight_update())

    async def update(self, update_info: dict[str, Any]) -> None:
        await self._all("update", lambda engine: engine.receive_weights(engine.parse_update_info(update_info)))

    async def finish_update(self, label: str) -> None:
        await self._all("finish", lambda engine: engine.finish_weight_update())

    async def pause(self, clear_cache: bool) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def lease(self, seconds: float, owner: str = "") -> None:
        pass


class NoStream:
    """Work is done when it is called."""

    def synchronize(self) -> None:
        pass


@dataclass
class Rig:
    world: World
    engines: list[Any]
    models: list[Loads]
    reloads: list[str]
    server: InProcess = field(init=False)

    def __post_init__(self) -> None:
        self.server = InProcess(self.engines)

    async def publish(self, transport: NcclTransport, sent: Snapshot) -> None:
        await transport.publish(self.server, sent, Pause(self.server, False, False))


def snapshot(version: int, rows: int = 1500) -> Snapshot:
    weights = [
        ("a.weight", torch.full((rows, 3), float(version), dtype=torch.bfloat16)),
        ("a.scale", torch.arange(7, dtype=torch.float32)),
        ("b.weight", torch.randn(33, dtype=torch.bfloat16)),
        ("steps", torch.tensor(2**40 + version)),
    ]
    return Snapshot(version, weights, probe())


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    pytest.importorskip("vllm")
    ours: Any = importlib.import_module("slipstream.weight_sync.vllm.engine.nccl_engine")
    common: Any = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
    packed: Any = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
    world, reloads = World(), list[str]()

    def join(unique_id: bytes, rank: int, world_size: int, device: Any) -> Blocking:
        return Blocking(world, unique_id, rank, world_size)

    monkeypatch.setattr(common, "uid_init_process_group", join)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(packed, "_get_streams", lambda device, count: (NoStream(),) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: reloads.append("initialize"))
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: reloads.append("finalize"))
    monkeypatch.setattr(communicator, "own_gpu", lambda: stand_in_gpu(world))
    models = [Loads(), Loads()]
    engines = []
    for rank, model in enumerate(models):
        parallel = SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank)
        config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.bfloat16))
        engines.append(ours.NcclEngine(None, config, torch.device("cpu"), model))
        model.engine = engines[-1]
    return Rig(world, engines, models, reloads)


def transport(bucket_bytes: int = 1024, timeout_s: float = 10) -> NcclTransport:
    return NcclTransport(WeightSyncSection(transport="nccl", bucket_bytes=bucket_bytes, timeout_s=timeout_s))


@pytest.mark.parametrize("bucket_bytes", [1024, 1 << 20], ids=["in parts", "at once"])
async def test_every_worker_of_vllms_engine_loads_what_was_sent(rig: Rig, bucket_bytes: int) -> None:
    sending = transport(bucket_bytes)
    await sending.connect(rig.server, 2)
    for version in (1, 2):
        sent = snapshot(version)
        await rig.publish(sending, sent)
        for model in rig.models:
            wanted = sent.manifest.views(sent.flat)
            assert model.loaded.keys() == wanted.keys()
            assert all(torch.equal(model.loaded[name], wanted[name]) for name in wanted)
    assert rig.world.misfits == []
    await sending.close()


def element(weight: torch.Tensor) -> None:
    weight[700, 1] += 1


def rows(weight: torch.Tensor) -> None:
    weight[3] += 1


def left_out(weight: torch.Tensor) -> None:
    weight.fill_(0.0)


@pytest.mark.parametrize("fault", [element, rows, left_out])
async def test_what_the_load_makes_of_a_tensor_is_found_in_the_worker_that_has_it(
    rig: Rig, fault: Callable[[torch.Tensor], None]
) -> None:
    sending = transport()
    await sending.connect(rig.server, 2)
    for version in (1, 2):
        await rig.publish(sending, snapshot(version))
        assert [(model.difference.checked, model.wrong) for model in rig.models] == [(1, []), (1, [])]
    rig.models[1].spoil = fault
    await rig.publish(sending, snapshot(3))
    assert [model.wrong for model in rig.models] == [[], ["a.weight"]]
    await sending.close()


async def test_a_loader_that_makes_another_thing_of_a_tensor_is_taken_at_its_word(rig: Rig) -> None:
    sending = transport()
    await sending.connect(rig.server, 2)
    for model in rig.models:
        model.spoil = lambda weight: weight.neg_()
    for version in (1, 2):
        await rig.publish(sending, snapshot(version))
        assert [(of.wrong, of.unread) for of in (model.difference for model in rig.models)] == [([], ["a.weight"])] * 2
    await sending.close()


async def test_a_tensor_that_is_sent_twice_or_in_another_type_is_refused(rig: Rig) -> None:
    (engine, *_) = rig.engines
    engine.start_weight_update()
    info = SimpleNamespace(names=["a.weight", "a.weight"], dtype_names=["bfloat16"] * 2, shapes=[[1500, 3]] * 2)
    with pytest.raises(ValueError, match=r"1 tensors were sent twice, among them a\.weight"):
        engine.receive_weights(info)
    info = SimpleNamespace(names=["a.weight"], dtype_names=["float16"], shapes=[[1500, 3]])
    with pytest.raises(ValueError, match=r"a\.weight came as float16.*set model\.dtype"):
        engine.receive_weights(info)


async def test_a_parameter_that_is_not_sent_leaves_the_model_not_whole(rig: Rig) -> None:
    """vLLM keeps the old weights, and only warns."""
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    engine, model = rig.engines[0], rig.models[0]
    info = reload.get_layerwise_info(model.a)
    info.restore_metadata = ({"weight": model.a.weight.data.to("meta")}, {})
    info.load_numel, info.load_numel_total = 0, model.a.weight.numel()
    engine.start_weight_update()
    with pytest.raises(ValueError, match=r"1 parameters .*were not sent whole, among them a\.weight"):
        engine.finish_weight_update()
    assert engine.proven is None


async def test_the_order_of_calls_is_vllms(rig: Rig) -> None:
    sending = transport()
    await sending.connect(rig.server, 2)
    await rig.publish(sending, snapshot(1))
    assert rig.server.calls == ["shutdown", "init", "pause", "start", "update", "finish", "resume"]
    assert rig.reloads == ["initialize"] * 2 + ["finalize"] * 2
    # vLLM's workers sum one element first of all; a peer that begins with a broadcast hangs.
    for rank in range(3):
        calls = [what for who, what in rig.world.calls if who == rank]
        assert calls[:2] == ["join", "sum"]
        assert set(calls[2:]) == {"broadcast"}
    await sending.close()


async def test_a_worker_that_never_takes_part_is_an_error_in_time_and_the_group_is_aborted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trl#6796: the raw collective would wait for ever, on whichever thread it is."""
    sending = transport(timeout_s=0.5)
    await sending.connect(rig.server, 2)
    rig.world.hung.add(2)
    with pytest.raises(TransferError, match="not done within"):
        async with asyncio.timeout(10):
            await rig.publish(sending, snapshot(1))
    assert 0 in rig.world.aborted
    assert "resume" not in rig.server.calls, "half of the model may be new"
    with pytest.raises(TransferError, match="not connected"):
        await rig.publish(sending, snapshot(2))
    for engine in rig.engines:
        engine.shutdown()


async def test_a_call_that_the_server_refuses_ends_the_broadcast_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own trainer looks at the answer once, before it broadcasts for ever (trl#6797)."""
    sending = transport(timeout_s=60)
    await sending.connect(rig.server, 2)

    async def refuse(update_info: dict[str, Any]) -> None:
        await asyncio.sleep(0.1)
        raise ControlError("HTTP 500: no such tensor")

    monkeypatch.setattr(rig.server, "update", refuse)
    with pytest.raises(ControlError, match="no such tensor"):
        async with asyncio.timeout(10):
            await rig.publish(sending, snapshot(1))
    assert 0 in rig.world.aborted
    for engine in rig.engines:
        engine.shutdown()


async def test_workers_that_do_not_come_to_the_group_are_an_error_in_time(rig: Rig) -> None:
    sending = transport(timeout_s=0.5)
    with pytest.raises((TransferError, ControlError), match="not all 4 ranks came together"):
        async with asyncio.timeout(10):
            await sending.connect(rig.server, 3)
    assert 0 in rig.world.aborted
    with rig.world.changed:  # vLLM's workers wait without an end: a test has to let them go
        for place in rig.world.places:
            place.aborted = True
        rig.world.changed.notify_all()
