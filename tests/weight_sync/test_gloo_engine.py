"""vLLM's end of the gloo transport, driven as vLLM's worker drives it, against the learner's real end."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit.sync import probe
from weight_sync.snapshot import Snapshot
from weight_sync.transports.base import TransferError
from weight_sync.transports.gloo.sender import GlooLink


@pytest.fixture(scope="module")
def module() -> Any:
    """Importing vLLM takes seconds: only when a test of this file runs."""
    pytest.importorskip("vllm")
    return importlib.import_module("weight_sync.transports.gloo.engine")


@dataclass
class Rig:
    """An engine of one worker; `loaded` holds what reached the model."""

    engine: Any
    loaded: list[dict[str, torch.Tensor]] = field(default_factory=list)
    links: list[GlooLink] = field(default_factory=list)

    def connect(self, timeout_s: float = 10) -> GlooLink:
        link = GlooLink("127.0.0.1", workers=1, bucket_bytes=256, timeout_s=timeout_s)
        self.links.append(link)
        joining = in_background(lambda: self.engine.init_transfer_engine(self.engine.parse_init_info(link.init_info())))
        link.connect()
        joining.join(10)
        return link

    def receive(self, link: GlooLink, sent: Snapshot) -> None:
        self.engine.start_weight_update()
        self.engine.update_weights(link.update_info(sent))


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def snapshot(version: int) -> Snapshot:
    return Snapshot(version, [("a", torch.full((300,), float(version))), ("b", torch.arange(7))], probe())


@pytest.fixture
def rig(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config="model config")
    rig = Rig(module.GlooEngine(None, config, torch.device("cpu"), "model"))

    def load(model: Any, model_config: Any, weights: dict[str, torch.Tensor]) -> None:
        assert (model, model_config) == ("model", "model config")
        rig.loaded.append({name: tensor.clone() for name, tensor in weights.items()})

    monkeypatch.setattr(module, "load_staged", load)
    yield rig
    for link in rig.links:
        link.close()


def test_the_model_is_touched_by_finish_alone_and_gets_what_was_sent(rig: Rig) -> None:
    link = rig.connect()
    for version in (1, 2):
        sent = snapshot(version)
        rig.receive(link, sent)
        link.send(sent)
        assert len(rig.loaded) == version - 1
        rig.engine.finish_weight_update()
        assert len(rig.loaded) == version
        assert torch.equal(rig.loaded[-1]["a"], torch.full((300,), float(version)))
        assert torch.equal(rig.loaded[-1]["b"], torch.arange(7))


def test_update_weights_returns_while_the_transfer_is_still_to_come(rig: Rig) -> None:
    link = rig.connect()
    began = time.monotonic()
    rig.receive(link, snapshot(1))
    assert time.monotonic() - began < 1
    with pytest.raises(RuntimeError, match="reception of the last update has not ended"):
        rig.engine.start_weight_update()
    link.send(snapshot(1))
    rig.engine.finish_weight_update()
    assert len(rig.loaded) == 1


def test_f2_damaged_weights_are_refused_at_both_ends_and_never_reach_the_model(rig: Rig) -> None:
    link = rig.connect()
    damaged = snapshot(1)
    damaged.__dict__["digest"] = bytes(32)
    rig.receive(link, damaged)
    with pytest.raises(TransferError, match="another digest"):
        link.send(damaged)
    with pytest.raises(RuntimeError, match="weights not swapped: the digest of what arrived is not the learner's"):
        rig.engine.finish_weight_update()
    assert rig.loaded == []


def test_f4_a_learner_that_dies_in_mid_transfer_is_an_error_in_time_and_the_next_session_works(rig: Rig) -> None:
    dead = rig.connect(timeout_s=1)
    rig.receive(dead, snapshot(1))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="weights not swapped"):
        rig.engine.finish_weight_update()
    assert time.monotonic() - began < 8
    assert rig.loaded == []

    rig.engine.shutdown()
    link = rig.connect()
    sent = snapshot(2)
    rig.receive(link, sent)
    link.send(sent)
    rig.engine.finish_weight_update()
    assert len(rig.loaded) == 1


def test_a_new_session_begins_while_the_reception_of_a_dead_one_still_waits(rig: Rig) -> None:
    rig.receive(rig.connect(timeout_s=5), snapshot(1))
    link = rig.connect()
    sent = snapshot(2)
    rig.receive(link, sent)
    link.send(sent)
    rig.engine.finish_weight_update()
    assert torch.equal(rig.loaded[0]["a"], torch.full((300,), 2.0))


def test_calls_out_of_order_are_refused(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="call /init_weight_transfer_engine first"):
        rig.engine.update_weights(snapshot(1).manifest.as_dict())
    rig.engine.start_weight_update()
    with pytest.raises(RuntimeError, match="no weights were sent"):
        rig.engine.finish_weight_update()
    assert rig.loaded == []


@pytest.mark.parametrize("info", [{}, {"names": [], "dtypes": [], "shapes": [], "packed": True}])
def test_a_manifest_of_another_shape_is_refused(rig: Rig, info: dict[str, Any]) -> None:
    rig.connect()
    rig.engine.start_weight_update()
    with pytest.raises(ValueError, match="Invalid update_info for GlooEngine"):
        rig.engine.update_weights(info)


def test_the_plugin_makes_the_engine_known_to_vllm_and_may_be_called_again(module: Any) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from weight_sync.vllm.plugin import register

    register()
    register()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(SimpleNamespace(backend="gloo"), config, None, None)
    assert isinstance(engine, module.GlooEngine)


def test_a_reload_warns_of_modules_with_parameters_only(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
