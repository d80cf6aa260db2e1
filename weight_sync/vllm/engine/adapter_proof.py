"""Compares an adapter in a worker's layers with the bytes that were sent.

The adapter's slot in vLLM's stacked LoRA layers is copied on the engine's thread, as a later step may give it to
another adapter, and compared on its own thread. What it must hold comes from the adapter's file on the server's
disk. The file's digest is a part of the adapter's name, so a file that was changed since it arrived is found too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import load

from slipstream.weight_sync.vllm.engine.contract import ModelRunner
from slipstream.weight_sync.vllm.engine.fingerprints import Difference
from slipstream.weight_sync.vllm.engine.layer_proof import Reading
from slipstream.weight_sync.vllm.engine.score_proof import put_under

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Slot:
    """One layer's part of an adapter.

    Attributes:
        names: Names in the adapter's file, one for each slice.
        a: Copies of A [rank, in], one for each slice, padded with zeros.
        b: Copies of B [out, rank], one for each slice, padded with zeros.
        layer: vLLM's layer.
    """

    names: list[str]
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    layer: Any


@dataclass(frozen=True)
class Copied:
    """The slots of one adapter on one worker.

    Attributes:
        unread: Layers whose slots are of another kind than a linear layer's.
        mapper: Maps names in a checkpoint to vLLM's, None if the model has no mapper.
        dtype: Type of the slots.
    """

    slots: list[Slot]
    unread: list[str]
    mapper: Any
    dtype: torch.dtype


def copy_adapter_slots(runner: ModelRunner, which: tuple[str, int, str]) -> Copied:
    """Copy the slots of an adapter, which is made active for that. To be called on the engine's thread.

    Args:
        runner: vLLM's model runner.
        which: Name, number and folder of the adapter.

    Raises:
        RuntimeError: vLLM did not make it active.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.request import LoRARequest

    put_under(runner, 2, LoRARequest(*which))
    manager = runner.lora_manager._adapter_manager
    if which[1] not in manager.lora_index_to_id:
        raise RuntimeError(f"the adapter {which[0]} is in no slot")
    index = manager.lora_index_to_id.index(which[1])
    slots, unread = [], []
    for name, layer in manager.modules.items():
        names = manager.packed_modules.get(name, [name])
        if not isinstance(layer, BaseLinearLayerWithLoRA) or len(names) != layer.n_slices:
            unread.append(name)
            continue
        a = [stacked[index, 0].to("cpu", copy=True) for stacked in layer.lora_a_stacked]
        b = [stacked[index, 0].to("cpu", copy=True) for stacked in layer.lora_b_stacked]
        slots.append(Slot(names, a, b, layer))
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = mapper.get_rename_mapper() if mapper is not None else None
    return Copied(slots, unread, renames, manager.lora_config.lora_dtype)


class AdapterReading(Reading):
    """Runs `compare` on a thread during generation."""

    def __init__(self, copied: Copied, name: str, folder: Path) -> None:
        super().__init__()
        self._what = (copied, name, folder)

    def difference(self) -> Difference:
        return compare(*self._what)


def compare(copied: Copied, name: str, folder: Path) -> Difference:
    """Compare the slots with the file in `folder` of the adapter `name`. Blocks while the file is read."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    try:
        data, text = file.read_bytes(), config.read_bytes()
    except OSError as error:
        return Difference(0, [f"its file on the server's disk, which cannot be read: {error}"], [])
    if blake3(data).update(text).hexdigest()[:16] != name.rpartition(".")[2]:
        return Difference(0, [f"its file on the server's disk, which was changed since it arrived: {file}"], [])
    sent = _sent(load(data), json.loads(text), copied)
    wrong: list[str] = []
    checked = 0
    for slot in copied.slots:
        expected = _of_this_worker(slot.layer, [sent.pop(name, (None, None)) for name in slot.names])
        for place, (a, b) in enumerate(expected):
            for kind, found, should in (("A", slot.a[place], a), ("B", slot.b[place], b)):
                checked += 1
                if not _holds(found, should):
                    wrong.append(f"{slot.names[place]}.lora_{kind}")
    # vLLM refuses tensors that it has no layer for, so those left here are in layers of another kind.
    return Difference(checked, sorted(wrong), sorted({*copied.unread, *sent}))


def _sent(tensors: dict[str, torch.Tensor], config: dict[str, Any], copied: Copied) -> dict[str, Pair]:
    """Return A and B by vLLM's name of the layer, as vLLM computes with them: in the slots' type, B scaled."""
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    helper = PEFTHelper.from_dict(config)
    found: dict[str, Pair] = {}
    for name, tensor in tensors.items():
        layer, is_a = parse_fine_tuned_lora_name(name, copied.mapper)
        a, b = found.get(layer, (None, None))
        tensor = tensor.to(copied.dtype)
        if is_a:
            found[layer] = tensor, b
            continue
        _, scaling = helper.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])
        found[layer] = a, tensor * scaling if scaling != 1 else tensor
    return found


def _of_this_worker(layer: Any, whole: list[Pair]) -> Iterator[Pair]:
    """Cut A and B as vLLM does for a tensor-parallel worker."""
    if layer.tp_size == 1 or all(part == (None, None) for part in whole):
        return iter(whole)
    a, b = [part[0] for part in whole], [part[1] for part in whole]
    if len(whole) == 1:
        return iter([(layer.slice_lora_a(a[0]), layer.slice_lora_b(b[0]))])
    return iter(zip(layer.slice_lora_a(a), layer.slice_lora_b(b), strict=True))


def _holds(found: torch.Tensor, should: torch.Tensor | None) -> bool:
    """Return whether a slot holds `should` in its first rows and columns and zeros elsewhere; None: zeros only."""
    expected = torch.zeros_like(found)
    if should is not None:
        if should.shape[0] > found.shape[0] or should.shape[1] > found.shape[1]:
            return False
        expected[: should.shape[0], : should.shape[1]] = should
    return torch.equal(found, expected)
