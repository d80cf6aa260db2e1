"""vLLM's end of the gloo transport, driven as vLLM's worker drives it, against the learner's real end."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.protocol.engine import Staged, Swap
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.server.control import ServerControl
from slipstream.weight_sync.server.pause import Pause
from slipstream.weight_sync.transports.base import StagedTransport, TransferError
from slipstream.weight_sync.transports.gloo.sender import GlooSender
from slipstream.weight_sync.transports.receiver import Share
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.sync import probe


@pytest.fixture(scope="module")
def module() -> Any:
    """Importing vLLM takes seconds: only when a test of this file runs."""
    pytest.importorskip("vllm")
    return importlib.import_module("slipstream.weight_sync.vllm.engine.staged_engine")


class InProcess(ServerControl):
    """A server that is nothing but `engine`. `loaded_at` is how many loads there had been at each call."""

    def __init__(self, engine: Any, loaded: list[dict[str, torch.Tensor]]) -> None:
        super().__init__("in process", 20)
        self.loaded_at: dict[str, int] = {}
        self._engine = engine
        self._loaded = loaded

    async def end_transfer(self) -> None:
        self._engine.shutdown()

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        await on_thread(self._engine.init_transfer_engine, self._engine.parse_init_info(init_info))

    async def start_update(self) -> None:
        self._engine.start_weight_update()

    async def update(self, update_info: dict[str, Any]) -> None:
        self._engine.update_weights(update_info)

    async def staged(self, wait_s: float) -> Staged:
        report = await on_thread(self._engine.staging, wait_s)
        return Staged(report["stage"], report["error"], report["seconds"])

    async def swap(self, label: str, clear_cache: bool) -> Swap:
        self.loaded_at["swap"] = len(self._loaded)
        self._engine.finish_weight_update()
        return Swap(0.002, 0.001)


@dataclass
class Rig:
    """An engine of one worker; `loaded` holds what reached the model."""

    engine: Any
    loaded: list[dict[str, torch.Tensor]] = field(default_factory=list)
    transports: list[StagedTransport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = InProcess(self.engine, self.loaded)

    async def connect(self, timeout_s: float = 10, ranks: int = 1) -> StagedTransport:
        section = WeightSyncSection(bucket_bytes=1024, timeout_s=timeout_s)
        transport = StagedTransport(section, [GlooSender(section) for _ in range(ranks)])
        self.transports.append(transport)
        await transport.connect(self.server, 1)
        return transport

    async def publish(self, transport: StagedTransport, sent: Snapshot) -> None:
        await transport.publish(self.server, sent, Pause(self.server, False, True))

    def receive(self, sent: Snapshot) -> None:
        """As if a learner had got so far, and no further."""
        self.engine.start_weight_update()
        self.engine.update_weights({"shares": [sent.manifest.as_dict() | {"label": sent.label}]})


def snapshot(version: int) -> Snapshot:
    return Snapshot(version, [("a", torch.full((1500,), float(version))), ("b", torch.arange(7))], probe())


@pytest.fixture
async def rig(module: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config="model config")
    rig = Rig(module.StagedEngine(SimpleNamespace(backend="gloo"), config, torch.device("cpu"), "model"))

    def build(engine: Any, shares: Sequence[Share]) -> Any:
        assert engine.model == "model"
        copies = {name: tensor.clone() for share in shares for piece in share.pieces for name, tensor in piece.items()}
        return SimpleNamespace(exchange=lambda: rig.loaded.append(copies))

    monkeypatch.setattr(module.StagedEngine, "build", build)
    yield rig
    for transport in rig.transports:
        await transport.close()


async def test_the_model_is_touched_by_finish_alone_and_gets_what_was_sent(rig: Rig) -> None:
    transport = await rig.connect()
    for version in (1, 2):
        await rig.publish(transport, snapshot(version))
        assert rig.server.loaded_at == {"swap": version - 1}
        assert len(rig.loaded) == version
        assert torch.equal(rig.loaded[-1]["a"], torch.full((1500,), float(version)))
        assert torch.equal(rig.loaded[-1]["b"], torch.arange(7))


async def test_update_weights_returns_while_the_transfer_is_still_to_come(rig: Rig) -> None:
    transport = await rig.connect()
    update = rig.server.update

    async def look(update_info: dict[str, Any]) -> None:
        began = time.monotonic()
        await update(update_info)
        assert time.monotonic() - began < 1
        with pytest.raises(RuntimeError, match="reception of the last update has not ended"):
            rig.engine.start_weight_update()

    rig.server.update = look  # type: ignore[method-assign]
    await rig.publish(transport, snapshot(1))
    assert len(rig.loaded) == 1


async def test_damaged_weights_are_refused_at_both_ends_and_never_reach_the_model(rig: Rig) -> None:
    transport = await rig.connect()
    damaged = snapshot(1)
    damaged.__dict__["digest"] = bytes(16)
    with pytest.raises(TransferError, match="another digest"):
        await rig.publish(transport, damaged)
    assert rig.engine.staging(5)["stage"] == "failed"
    with pytest.raises(RuntimeError, match="weights not swapped: TransferError: what arrived has another digest than"):
        rig.engine.finish_weight_update()
    assert rig.loaded == []


async def test_a_learner_that_dies_in_mid_transfer_is_an_error_in_time_and_the_next_connection_works(
    rig: Rig,
) -> None:
    await rig.connect(timeout_s=1)
    rig.receive(snapshot(1))
    with pytest.raises(RuntimeError, match="weights not swapped: they have not all arrived"):
        rig.engine.finish_weight_update()
    began = time.monotonic()
    assert rig.engine.staging(8)["stage"] == "failed"
    assert time.monotonic() - began < 8
    with pytest.raises(RuntimeError, match="weights not swapped"):
        rig.engine.finish_weight_update()
    assert rig.loaded == []

    rig.engine.shutdown()
    await rig.publish(await rig.connect(), snapshot(2))
    assert len(rig.loaded) == 1


async def test_a_new_connection_begins_while_the_reception_of_a_dead_one_still_waits(rig: Rig) -> None:
    await rig.connect(timeout_s=5)
    rig.receive(snapshot(1))
    await rig.publish(await rig.connect(), snapshot(2))
    assert torch.equal(rig.loaded[0]["a"], torch.full((1500,), 2.0))


async def test_shares_of_two_versions_are_refused_before_any_is_received(rig: Rig) -> None:
    transport = await rig.connect(ranks=2)
    rig.engine.start_weight_update()
    now, before = [await transport.senders[version - 1].offer_labelled(snapshot(version)) for version in (2, 1)]
    for shares, found in (([now, before], "1, .*2"), ([now, {**before, "label": None}], "2, None"), ([{}, {}], "None")):
        with pytest.raises(ValueError, match=rf"not of one version: .*{found}"):
            rig.engine.update_weights({"shares": shares})
    assert rig.engine.staging()["error"] == "no weights were sent since start_weight_update"


def test_calls_out_of_order_are_refused(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="call /init_weight_transfer_engine first"):
        rig.engine.update_weights({"shares": [snapshot(1).manifest.as_dict()]})
    rig.engine.start_weight_update()
    with pytest.raises(RuntimeError, match="no weights were sent"):
        rig.engine.finish_weight_update()
    assert rig.loaded == []


@pytest.mark.parametrize("info", [{}, {"names": [], "dtypes": [], "shapes": []}, {"shares": [], "packed": True}])
async def test_a_manifest_of_another_shape_is_refused(rig: Rig, info: dict[str, Any]) -> None:
    await rig.connect()
    rig.engine.start_weight_update()
    with pytest.raises(ValueError, match="Invalid update_info for StagedEngine"):
        rig.engine.update_weights(info)


def test_a_reload_warns_of_modules_with_parameters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    module = importlib.import_module("slipstream.weight_sync.vllm.engine.reload")

    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3))

    model = torch.nn.Sequential(Rotary(), torch.nn.Linear(2, 2))
    model.load_weights = list  # type: ignore[assignment]
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    def finalize(*_: object) -> None:
        for layer in model.children():
            logger.warning("%s: Failed to load weights", layer.__class__.__name__)
        logger.warning("Allocating")

    monkeypatch.setattr(module, "finalize_layerwise_reload", finalize)
    keep = Keep()
    logger.addHandler(keep)
    try:
        module.load_staged(model, None, {})
        finalize()
    finally:
        logger.removeHandler(keep)
    quiet = ["Linear: Failed to load weights", "Allocating"]
    assert records == [*quiet, "Rotary: Failed to load weights", *quiet]
