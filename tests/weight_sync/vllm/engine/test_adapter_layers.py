"""What the slots of vLLM's LoRA layers hold, against an adapter's file: each fault is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from slipstream.protocol.versions import name_of
from slipstream.weight_sync.weights.snapshot import adapter_digest

pytest.importorskip("vllm")

HIDDEN, RANK, MOST, SLOTS = 16, 4, 8, 3
CONFIG = json.dumps({"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]})
PREFIX = "base_model.model.model.layers.0.self_attn"
WIDTHS = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 16}


def layer(kind: str, slices: list[int]) -> Any:
    """One of vLLM's own, without a base layer."""
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA, RowParallelLinearWithLoRA

    cls: Any = {"qkv": MergedQKVParallelLinearWithLoRA, "row": RowParallelLinearWithLoRA}[kind]
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    made.n_slices, made.tp_size = len(slices), 1
    made.lora_a_stacked = tuple(torch.zeros(SLOTS, 1, MOST, HIDDEN) for _ in slices)
    made.lora_b_stacked = tuple(torch.zeros(SLOTS, 1, width, MOST) for width in slices)
    return made


class Worker:
    """The LoRA side of a vLLM worker. An adapter becomes active in slot 1, which holds another one's remains."""

    def __init__(self, sent: dict[str, torch.Tensor]) -> None:
        self.qkv, self.out = layer("qkv", [16, 8, 8]), layer("row", [16])
        self.moe = torch.nn.Module()
        for stacked in (*self.qkv.lora_a_stacked, *self.qkv.lora_b_stacked, *self.out.lora_b_stacked):
            stacked[1] = 7.0
        self.lora_config = object()
        self._sent = sent
        self.manager = SimpleNamespace(
            modules={"model.layers.0.self_attn.qkv_proj": self.qkv, "model.layers.0.self_attn.o_proj": self.out},
            packed_modules={
                "model.layers.0.self_attn.qkv_proj": [_name(part) for part in ("q_proj", "k_proj", "v_proj")]
            },
            lora_index_to_id=[None] * SLOTS,
            lora_config=SimpleNamespace(lora_dtype=torch.float32),
            model=SimpleNamespace(),
        )
        self.lora_manager = SimpleNamespace(_adapter_manager=self.manager)

    def _set_active_loras(self, *_: Any) -> None:
        a = {part: self._sent.get(f"{PREFIX}.{part}.lora_A.weight") for part in WIDTHS}
        b = {part: self._sent.get(f"{PREFIX}.{part}.lora_B.weight") for part in WIDTHS}
        scaled = {part: None if of is None else of * 2.0 for part, of in b.items()}
        parts = ("q_proj", "k_proj", "v_proj")
        self.qkv.set_lora(1, [a[part] for part in parts], [scaled[part] for part in parts])
        if a["o_proj"] is None:
            self.out.reset_lora(1)
        else:
            self.out.set_lora(1, a["o_proj"], scaled["o_proj"])
        self.manager.lora_index_to_id[1] = 5


def _name(part: str) -> str:
    return f"model.layers.0.self_attn.{part}"


def tensors(parts: tuple[str, ...] = tuple(WIDTHS)) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    a = {f"{PREFIX}.{part}.lora_A.weight": torch.randn(RANK, HIDDEN) for part in parts}
    return a | {f"{PREFIX}.{part}.lora_B.weight": torch.randn(WIDTHS[part], RANK) for part in parts}


def stored(folder: Path, sent: dict[str, torch.Tensor]) -> str:
    """Its name; the files lie in `folder`."""
    file = save(sent)
    (folder / "adapter_model.safetensors").write_bytes(file)
    (folder / "adapter_config.json").write_text(CONFIG)
    return name_of(1, adapter_digest(file, CONFIG))


def found(folder: Path, name: str, worker: Worker, fault: Callable[[Worker], None] | None = None) -> Any:
    from slipstream.weight_sync.vllm.engine import adapter_proof

    copied = adapter_proof.copy_adapter_slots(worker, (name, 5, str(folder)))
    if fault is not None:
        fault(worker)
        active, worker._set_active_loras = worker._set_active_loras, lambda *_: None  # type: ignore[method-assign]
        copied = adapter_proof.copy_adapter_slots(worker, (name, 5, str(folder)))
        worker._set_active_loras = active  # type: ignore[method-assign]
    reading = adapter_proof.AdapterReading(copied, name, folder)
    reading.start()
    reading.join(10)
    return SimpleNamespace(**reading.result())


@pytest.mark.parametrize("parts", [tuple(WIDTHS), ("q_proj", "v_proj"), ("o_proj",)])
def test_an_adapter_that_was_loaded_well_is_what_was_sent(tmp_path: Path, parts: tuple[str, ...]) -> None:
    sent = tensors(parts)
    difference = found(tmp_path, stored(tmp_path, sent), Worker(sent))
    assert (difference.checked, difference.wrong, difference.unread) == (8, [], [])


def element(worker: Worker) -> None:
    worker.qkv.lora_a_stacked[2][1, 0, 3, 5] += 1e-6


def rows(worker: Worker) -> None:
    b = worker.qkv.lora_b_stacked[1][1, 0]
    b[[2, 5]] = b[[5, 2]]


def remains(worker: Worker) -> None:
    """Beyond the adapter's rank, where it must be zero."""
    worker.out.lora_b_stacked[0][1, 0, 3, RANK] = 0.5


def other_adapter(worker: Worker) -> None:
    worker.out.lora_a_stacked[0][1] = 0.25


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (element, "v_proj.lora_A"),
        (rows, "k_proj.lora_B"),
        (remains, "o_proj.lora_B"),
        (other_adapter, "o_proj.lora_A"),
    ],
)
def test_what_a_slot_holds_instead_is_found_and_named(
    tmp_path: Path, fault: Callable[[Worker], None], where: str
) -> None:
    sent = tensors()
    difference = found(tmp_path, stored(tmp_path, sent), Worker(sent), fault)
    assert difference.wrong == [_name(where)]


def test_a_part_that_was_not_loaded_is_found(tmp_path: Path) -> None:
    sent = tensors()
    name = stored(tmp_path, sent)
    difference = found(tmp_path, name, Worker(tensors(("q_proj", "k_proj", "o_proj"))))
    assert [name for name in difference.wrong if "v_proj" in name] == [_name("v_proj.lora_A"), _name("v_proj.lora_B")]


def test_a_file_that_was_changed_on_the_server_is_named(tmp_path: Path) -> None:
    sent = tensors()
    name = stored(tmp_path, sent)
    stored(tmp_path, {of: tensor + 1 for of, tensor in sent.items()})
    (wrong,) = found(tmp_path, name, Worker(sent)).wrong
    assert "changed since it arrived" in wrong
    (tmp_path / "adapter_model.safetensors").unlink()
    (wrong,) = found(tmp_path, name, Worker(sent)).wrong
    assert "cannot be read" in wrong


def test_layers_of_another_kind_are_named_as_not_read(tmp_path: Path) -> None:
    sent = tensors()
    worker = Worker(sent)
    worker.manager.modules["model.layers.0.mlp.experts"] = worker.moe
    difference = found(tmp_path, stored(tmp_path, sent), worker)
    assert (difference.wrong, difference.unread) == ([], ["model.layers.0.mlp.experts"])


def test_an_adapter_that_is_in_no_slot_is_an_error(tmp_path: Path) -> None:
    from slipstream.weight_sync.vllm.engine import adapter_proof

    worker = Worker(tensors())
    worker._set_active_loras = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"policy is in no slot"):
        adapter_proof.copy_adapter_slots(worker, ("policy", 5, str(tmp_path)))
