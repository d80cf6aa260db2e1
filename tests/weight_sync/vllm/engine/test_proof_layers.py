"""What layers hold, by fingerprint: each fault is found in the layer that has it, and nothing else is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.weight_sync.vllm.engine import fingerprints, layer_proof
from slipstream.weight_sync.vllm.engine.fingerprints import Difference, ModelFingerprints, compare, fingerprint, held
from slipstream.weight_sync.vllm.engine.layer_proof import ModelReading
from slipstream.weight_sync.vllm.engine.shadow_modules import PackingError, TorchLinear, can_pack

TYPES = [torch.float32, torch.bfloat16]


class Model(nn.Module):
    """As vLLM holds one on a CPU: a linear layer computes with a packed copy, and its own weight is empty; where the
    CPU cannot pack this type, it computes with its own weight."""

    def __init__(self, dtype: torch.dtype, packed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.up = nn.Linear(16, 24, bias=False, dtype=dtype)
        self.register_buffer("places", torch.arange(4))
        self.packed = packed
        self.pack(self.up.weight.detach())

    def pack(self, weight: torch.Tensor) -> None:
        if self.packed:
            self.up.cpu_linear = TorchLinear(weight.clone())  # type: ignore[assignment]
            self.up.weight = nn.Parameter(torch.empty(0))
        else:
            self.up.cpu_linear = nn.functional.linear  # type: ignore[assignment]
            self.up.weight = nn.Parameter(weight.clone())

    @property
    def dense(self) -> torch.Tensor:
        linear: object = self.up.cpu_linear
        return linear.dense().clone() if isinstance(linear, TorchLinear) else self.up.weight.detach().clone()

    @property
    def name(self) -> str:
        """Return the name of the tensor that the linear layer computes with."""
        return "up.packed0" if self.packed else "up.weight"


def exchange_rows(model: Model) -> None:
    rows = model.embedding.weight.data
    rows[[3, 4]] = rows[[4, 3]]


def change_element(model: Model) -> None:
    model.embedding.weight.data[7, 5] += 0.02


def change_packed_element(model: Model) -> None:
    dense = model.dense
    dense[11, 2] += 0.02
    model.pack(dense)


def shift_packed(model: Model) -> None:
    model.pack(model.dense + 1e-5)


def leave_out(model: Model) -> None:
    model.pack(torch.randn(24, 16, dtype=model.norm.weight.dtype))


# Whether a fault is the linear layer's.
FAULTS: list[tuple[Callable[[Model], None], bool]] = [
    (exchange_rows, False),
    (change_element, False),
    (change_packed_element, True),
    (leave_out, True),
]
# What is packed on a CPU with AVX-512, and what is not without: the second on every machine.
WAYS = [(dtype, packed) for dtype in TYPES for packed in (True, False) if can_pack(dtype) or not packed]


@pytest.mark.parametrize(("dtype", "packed"), WAYS)
@pytest.mark.parametrize(("fault", "linear"), FAULTS)
def test_each_fault_is_found_in_its_layer(
    fault: Callable[[Model], None], linear: bool, dtype: torch.dtype, packed: bool
) -> None:
    proven, live = Model(dtype, packed), Model(dtype, packed)
    assert compare(held(proven), held(live)).wrong == []
    fault(live)
    assert compare(held(proven), held(live)).wrong == [live.name if linear else "embedding.weight"]


def test_a_layer_that_is_off_by_very_little_is_found() -> None:
    proven, live = Model(torch.float32), Model(torch.float32)
    shift_packed(live)
    assert compare(held(proven), held(live)).wrong == ["up.packed0"]


def test_a_layer_that_was_packed_by_a_handle_instead_is_not_what_was_proven() -> None:
    proven, live = Model(torch.float32), Model(torch.float32)
    handle = object()
    live.up.cpu_linear = lambda x: (handle, x)  # type: ignore[assignment]
    assert held(live).unread == ["up.packed0"]
    assert compare(held(proven), held(live)).wrong == ["up.packed0"]


def test_a_handle_beside_a_weight_that_is_kept_is_not_taken_for_that_weight() -> None:
    """An output head keeps its weight, and computes with the handle."""
    model = Model(torch.float32)
    handle = object()
    model.up.weight = nn.Parameter(torch.zeros(24, 16))
    model.up.cpu_linear = lambda x: (handle, x)  # type: ignore[assignment]
    assert held(model).unread == ["up.packed0"]
    model.up.cpu_linear = nn.functional.linear  # type: ignore[assignment]
    assert held(model).unread == []


def test_everything_that_is_computed_with_is_compared() -> None:
    model = Model(torch.float32)
    names = ["embedding.weight", "norm.bias", "norm.weight", "places", "up.packed0"]
    assert sorted(held(model).prints) == names
    assert compare(held(model), held(Model(torch.float32))).checked == len(names)


def test_live_layers_are_read_on_a_thread() -> None:
    model = Model(torch.float32)
    proven = held(model)
    exchange_rows(model)
    reading = ModelReading(model, proven)
    reading.start()
    reading.join(10)
    assert reading.result() == {"checked": 5, "wrong": ["embedding.weight"], "unread": []}


class Cuda:
    """Records what is asked of `torch.cuda`. A thread begins with device 0, as in CUDA."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def set_device(self, device: torch.device) -> None:
        self.asked.append(device)

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: f"event of {device}")

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        self.asked.append(f"stream on {device}")
        return SimpleNamespace(wait_event=self.asked.append)

    def stream(self, stream: Any) -> Any:
        return nullcontext(self.asked.append("reads"))


def test_layers_on_a_gpu_are_read_on_one_stream_of_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, gpu = Cuda(), torch.device("cuda", 1)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(layer_proof, "_streams", {})
    model: Any = SimpleNamespace(
        parameters=lambda: iter([SimpleNamespace(device=gpu)]), named_modules=lambda **_: iter(())
    )
    for _ in range(2):
        assert ModelReading(model, ModelFingerprints()).difference() == Difference(0, [], [])
    reads = [gpu, "event of cuda:1", "reads"]
    assert cuda.asked == [gpu, "stream on cuda:1", *reads[1:], *reads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64])
def test_the_fingerprint_on_a_device_sees_every_change(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "CHUNK", 100)
    torch.manual_seed(0)
    one = (torch.randn(40, 9) * 100).to(dtype)
    exchanged, changed = one.clone(), one.clone()
    exchanged[[3, 20]] = exchanged[[20, 3]]
    changed[11, 4] += 1
    prints = [fingerprints._bits_on_device(of) for of in (one, one.clone(), exchanged, changed)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_fingerprint_is_of_shape_and_type_too() -> None:
    zeros = torch.zeros(4, 2)
    assert len({fingerprint(of) for of in (zeros, zeros.view(2, 4), zeros.int())}) == 3


def test_a_packed_weight_is_read_where_it_lies() -> None:
    weight = torch.randn(96, 64)
    changed = weight.clone()
    changed[5, 7] += 1e-6
    packed = [TorchLinear(of).packed for of in (weight, weight.clone(), changed, weight.flip(0))]
    prints = [fingerprint(of) for of in packed]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


WITHOUT_BFLOAT16 = """
import torch
from slipstream.weight_sync.vllm.engine.shadow_modules import TorchLinear, can_pack

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    try:
        TorchLinear(torch.ones(24, 16, dtype=dtype))
    except Exception as error:
        print(dtype, can_pack(dtype), type(error).__name__)
    else:
        print(dtype, can_pack(dtype), "packed")
"""


def test_torch_says_what_it_cannot_pack_on_a_cpu_with_avx2_alone() -> None:
    """This variable has oneDNN use no more than AVX2, on an x86 machine that has more."""
    only_avx2 = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BFLOAT16], capture_output=True, text=True, timeout=110, env=only_avx2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in said] == ["torch.float32", "torch.bfloat16", "torch.float16"]
    assert said[0][1:] == ["True", "packed"]
    assert all(can == "False" or became == "packed" for _, can, became in said)
    if platform.machine() == "x86_64":
        assert said[1][1:] == ["False", "PackingError"]


def test_a_weight_that_cannot_be_packed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuses, raising=False)
    remedy = r'weight \[24, 16\] of torch\.bfloat16 .*\(bf16 path needs .*\).* set model\.dtype = "float32"'
    with pytest.raises(PackingError, match=remedy):
        TorchLinear(torch.ones(24, 16, dtype=torch.bfloat16))
