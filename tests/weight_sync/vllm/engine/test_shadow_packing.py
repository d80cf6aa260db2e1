"""A shadow of one of vLLM's linear layers on a CPU: packed where the CPU can, computed plainly where it cannot."""

from __future__ import annotations

import gc
import importlib
import time
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from slipstream.weight_sync.vllm.engine import shadow, shadow_modules
from slipstream.weight_sync.vllm.engine.arrivals import Arrivals
from slipstream.weight_sync.vllm.engine.fingerprints import compare, held
from slipstream.weight_sync.vllm.engine.shadow_modules import PackingError, TorchLinear

ROWS, COLUMNS = 96, 64
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(model="small", dtype=torch.bfloat16),
    parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, enable_expert_parallel=False),
)


@pytest.fixture(autouse=True)
def worker_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    config: Any = importlib.import_module("vllm.config")
    parameter: Any = importlib.import_module("vllm.model_executor.parameter")
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    shadow_modules.install_torch_packing()
    with config.set_current_vllm_config(config.VllmConfig()):
        yield


class Served(nn.Module):
    """As a server loads it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        linear: Any = importlib.import_module("vllm.model_executor.layers.linear")
        self.up = linear.ReplicatedLinear(COLUMNS, ROWS, bias=False, params_dtype=dtype, disable_tp=True, prefix="up")
        record_metadata_for_reloading(self)
        self.load_weights(weights(dtype, seed=1).items())
        self.up.quant_method.process_weights_after_loading(self.up)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            parameter: Any = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.up.quant_method.apply(self.up, x, None)
        return product


def weights(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    return {"up.weight": (torch.randn(ROWS, COLUMNS, generator=seeded) * 0.1).to(dtype)}


def publish(served: Served, sent: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    CONFIG.model_config.dtype = dtype
    new = shadow.build(served, CONFIG, Arrivals.of(sent))
    assert isinstance(new, shadow.Shadow)
    new.exchange()
    return new.proven


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpu_packs", [True, False])
def test_what_is_published_is_served_and_proven_whether_or_not_the_cpu_packs(
    dtype: torch.dtype, cpu_packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_packs:
        monkeypatch.setattr(shadow_modules, "can_pack", lambda _: False)
    packed = shadow_modules.can_pack(dtype)
    served, x = Served(dtype), torch.eye(COLUMNS, dtype=dtype)
    for seed in (2, 3):
        sent = weights(dtype, seed)
        proven = publish(served, sent, dtype)
        assert torch.equal(served(x).T, sent["up.weight"])
        assert isinstance(served.up.cpu_linear, TorchLinear) == packed
        found = compare(proven, held(served))
        assert (found.checked, found.wrong, found.unread) == (1, [], [])


def test_a_layer_that_could_not_be_packed_is_named_and_no_other_model_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("no memory")

    served = Served(torch.float32)
    before = served(torch.eye(COLUMNS))
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuses, raising=False)
    with pytest.raises(PackingError, match=r"^up\.weight .* was loaded, but not packed: .*\(no memory\)") as error:
        publish(served, weights(torch.float32, seed=2), torch.float32)
    assert "model.dtype" in str(error.value)
    assert "another model" not in str(error.value)
    assert torch.equal(served(torch.eye(COLUMNS)), before)


@pytest.mark.parametrize(
    ("says", "blames"),
    [("not enough memory", False), ("The size of tensor a (4) must match the size of tensor b (8)", True)],
)
def test_a_loader_that_fails_blames_another_model_only_where_shapes_differ(says: str, blames: bool) -> None:
    class Failing(Served):
        def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(named)
            if not self.first:
                raise RuntimeError(says)
            self.first = False

        first = True

    served = Failing(torch.float32)
    with pytest.raises((RuntimeError, ValueError), match=r"^up\.weight .* could not be loaded") as error:
        publish(served, weights(torch.float32, seed=2), torch.float32)
    assert says in str(error.value)
    assert ("another model" in str(error.value)) == blames


def test_p1_replaced_weights_are_freed_without_a_collection_of_cycles() -> None:
    served = Served(torch.float32)
    publish(served, weights(torch.float32, seed=2), torch.float32)
    gc.collect()
    gc.disable()
    try:
        replaced = [weakref.ref(served.up.cpu_linear), weakref.ref(served.up.weight)]
        publish(served, weights(torch.float32, seed=3), torch.float32)
        ends = time.monotonic() + 5
        while any(kept() is not None for kept in replaced) and time.monotonic() < ends:
            time.sleep(0.05)
        assert [kept() for kept in replaced] == [None, None]
    finally:
        gc.enable()
