"""What linear layers compute whose weights cannot be read back: vLLM's own layers on a CPU, packed by oneDNN.

vLLM packs a layer behind a handle where the CPU can, and multiplies plainly where it cannot: bfloat16 with AVX2 alone.
A stand-in for oneDNN has a handle for every type, so that both ways are tested on every machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from slipstream.weight_sync.vllm.engine import layer_proof
from slipstream.weight_sync.vllm.engine.fingerprints import ModelFingerprints, cannot_be_read, compare, held
from slipstream.weight_sync.vllm.engine.layer_proof import HALF, ModelReading, of_weight, vectors, watching
from slipstream.weight_sync.vllm.engine.shadow_modules import can_pack

ROWS, COLUMNS = 96, 64
TYPES = [torch.float32, torch.bfloat16]
# Who makes the handles: vLLM, of the types that this CPU packs, or the stand-in, of any.
HANDLES = [("vllm", dtype) for dtype in TYPES if can_pack(dtype)] + [("stand-in", dtype) for dtype in TYPES]


@pytest.fixture(autouse=True)
def worker_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's own packing, whatever other tests of this process have installed."""
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    config: Any = importlib.import_module("vllm.config")
    original = utils.dispatch_cpu_unquantized_gemm
    for cell in original.__closure__ or () if getattr(original, "by_slipstream", False) else ():
        if getattr(cell.cell_contents, "__name__", "") == "dispatch_cpu_unquantized_gemm":
            monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", cell.cell_contents)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
    # A worker alone.
    parameter: Any = importlib.import_module("vllm.model_executor.parameter")
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    with config.set_current_vllm_config(config.VllmConfig()):
        yield


class Handle:
    """Holds a weight where nothing reads it."""

    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor, _primitives: int) -> None:
        self._weight = weight.t().clone()

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(x, self._weight, bias)


def no_handle(weight: torch.Tensor, _primitives: int) -> None:
    raise RuntimeError(f"no primitive for {weight.dtype} on this CPU")


@pytest.fixture
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose who packs: "vllm", "stand-in", or "nobody", as on a CPU that cannot."""
    who: str = request.param
    ops: Any = importlib.import_module("vllm._custom_ops")
    if who != "vllm":
        monkeypatch.setattr(ops, "_supports_onednn", True)
        monkeypatch.setattr(ops, "create_onednn_mm", Handle if who == "stand-in" else no_handle)
        monkeypatch.setattr(ops, "onednn_mm", Handle.times)
    return who


def layer(dtype: torch.dtype) -> Any:
    linear: Any = importlib.import_module("vllm.model_executor.layers.linear")
    return linear.ReplicatedLinear(COLUMNS, ROWS, bias=False, params_dtype=dtype, disable_tp=True, prefix="up")


def weight(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.1).to(dtype)


def pack(up: Any, holding: torch.Tensor) -> None:
    """As vLLM loads: the weight is taken into a handle, and let go."""
    up.weight = nn.Parameter(holding.clone(), requires_grad=False)
    up.quant_method.process_weights_after_loading(up)


class Model(nn.Module):
    """Its layer is packed and cannot be read. `proven`: what a load of `weight(dtype)` says that it must compute."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = layer(dtype)
        pack(self.up, weight(dtype, seed=9))
        self.load()

    def load(self) -> None:
        with watching([("up", self.up, self.up)]) as watched:
            pack(self.up, weight(self.up.params_dtype))
        self.proven = ModelFingerprints(products=watched.products)

    @property
    def wrong(self) -> list[str]:
        return layer_proof.probe_products(self, self.proven).wrong


@pytest.mark.parametrize(("by", "dtype"), HANDLES, indirect=["by"])
def test_a_layer_behind_a_handle_is_probed_and_what_is_right_passes(by: str, dtype: torch.dtype) -> None:
    model = Model(dtype)
    assert cannot_be_read(model.up)
    assert held(model).unread == ["up.packed0"]
    reading = ModelReading(model, model.proven, layer_proof.probe_products(model, model.proven))
    reading.start()
    reading.join(10)
    assert reading.result() == {"checked": 1, "wrong": [], "unread": []}
    for _ in range(COLUMNS // HALF):
        model.load()
        assert model.wrong == []


def element(of: torch.Tensor) -> None:
    of[11, 3] += 0.02


def row(of: torch.Tensor) -> None:
    of[7] += 0.02


def columns(of: torch.Tensor) -> None:
    of[:, [5, 60]] = of[:, [60, 5]]


def rows(of: torch.Tensor) -> None:
    of[[7, 9]] = of[[9, 7]]


FAULTS: list[tuple[Callable[[torch.Tensor], None], str]] = [
    (element, "row 11"),
    (row, "row 7"),
    (columns, f"{ROWS} rows"),
    (rows, "2 rows, among them row 7"),
]


@pytest.mark.parametrize(("by", "dtype"), HANDLES, indirect=["by"])
@pytest.mark.parametrize(("fault", "where"), FAULTS)
def test_each_fault_in_a_layer_that_cannot_be_read_is_found(
    fault: Callable[[torch.Tensor], None], where: str, by: str, dtype: torch.dtype
) -> None:
    model = Model(dtype)
    changed = weight(dtype)
    fault(changed)
    pack(model.up, changed)
    (wrong,) = model.wrong
    assert wrong.startswith("up (products of ")
    assert where in wrong or (fault is columns and "rows, among them" in wrong)


@pytest.mark.parametrize(("by", "dtype"), HANDLES, indirect=["by"])
def test_a_layer_that_was_left_out_is_found(by: str, dtype: torch.dtype) -> None:
    model = Model(dtype)
    pack(model.up, weight(dtype, seed=9))
    assert len(model.wrong) == 1


@pytest.mark.parametrize(("by", "dtype"), [("nobody", dtype) for dtype in TYPES], indirect=["by"])
@pytest.mark.parametrize("fault", [fault for fault, _ in FAULTS])
def test_a_layer_that_the_cpu_cannot_pack_is_read_back_and_each_fault_is_found(
    fault: Callable[[torch.Tensor], None], by: str, dtype: torch.dtype
) -> None:
    proven, live = Model(dtype), Model(dtype)
    assert not cannot_be_read(live.up)
    assert proven.proven.products == {}
    assert live.up.quant_method.apply(live.up, torch.ones(1, COLUMNS, dtype=dtype), None).shape == (1, ROWS)
    found = compare(held(proven), held(live))
    assert (found.checked, found.wrong, found.unread) == (1, [], [])
    changed = weight(dtype)
    fault(changed)
    pack(live.up, changed)
    assert compare(held(proven), held(live)).wrong == ["up.weight"]


def test_an_element_that_is_off_by_less_than_rounding_is_found_when_its_column_is_read_alone() -> None:
    changed = weight(torch.bfloat16)
    changed[11, 3] = torch.nextafter(changed[11, 3], torch.tensor(9.0, dtype=torch.bfloat16))
    model = Model(torch.bfloat16)
    pack(model.up, changed)
    found = []
    for number in range(COLUMNS // HALF):
        model.proven = ModelFingerprints(products={"up": of_weight(weight(torch.bfloat16), number)})
        found.append(len(model.wrong))
    assert found == [1] + [0] * (COLUMNS // HALF - 1)


def test_the_one_hot_vectors_read_every_column_once_in_a_round() -> None:
    hot = [vectors(COLUMNS, number, torch.float32, torch.device("cpu"))[:HALF] for number in range(COLUMNS // HALF)]
    assert torch.equal(torch.cat(hot), torch.eye(COLUMNS))
    assert vectors(3, 5, torch.float32, torch.device("cpu")).shape == (2 * HALF, 3)


class EightBits:
    """A quantised method: one scale a tensor, and products of what it rounded. `lost`: what it leaves as it was."""

    def __init__(self) -> None:
        self.lost = False

    def process_weights_after_loading(self, layer: Any) -> None:
        loaded = layer.weight.detach().float()
        if not self.lost:
            self.scale = float(loaded.abs().max()) / 448
            self.kept = (loaded / self.scale).to(torch.float8_e4m3fn)
        layer.weight = nn.Parameter(self.kept, requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return (x.float() @ (layer.weight.float() * self.scale).T).to(torch.bfloat16)


def test_a_quantised_layer_is_probed_within_what_it_rounds() -> None:
    model = Model(torch.bfloat16)
    model.up.quant_method = EightBits()
    del model.up.cpu_linear
    pack(model.up, weight(torch.bfloat16, seed=9))
    model.load()
    assert model.wrong == []
    model.up.quant_method.lost = True
    with watching([("up", model.up, model.up)]) as watched:
        pack(model.up, weight(torch.bfloat16, seed=3))
    model.proven = ModelFingerprints(products=watched.products)
    assert len(model.wrong) == 1


def test_after_a_load_in_place_a_layer_is_wrong_only_if_it_was_right_before() -> None:
    """How a quantised layer rounds is an estimate: one that always rounds more is left to the log-probs."""
    model, known = Model(torch.float32), set[str]()
    right, wrong = weight(torch.float32), weight(torch.float32, seed=9)
    model.proven = ModelFingerprints(products=model.proven.products, known=known)
    seen = []
    for held_now in (wrong, right, wrong):
        pack(model.up, held_now)
        found = layer_proof.probe_products(model, model.proven)
        seen.append((found.checked, len(found.wrong), found.unread))
    assert seen == [(0, 0, ["up"]), (1, 0, []), (1, 1, [])]


def test_a_layer_that_cannot_be_multiplied_is_named_as_unread() -> None:
    model = Model(torch.float32)
    model.up.cpu_linear = lambda *_: torch.zeros(3)
    found = layer_proof.probe_products(model, model.proven)
    assert (found.checked, found.wrong, found.unread) == (0, [], ["up"])


def test_what_was_watched_is_left_as_it_was() -> None:
    model = Model(torch.float32)
    assert "process_weights_after_loading" not in vars(model.up.quant_method)
