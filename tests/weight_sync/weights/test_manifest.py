"""The flat buffer's layout, and snapshots of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weight_sync.weights import snapshot as snapshots
from slipstream.weight_sync.weights.host_memory import HUGE, Reserve
from slipstream.weight_sync.weights.manifest import ALIGNMENT, Manifest
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot, digest_of

PROBE = Probe([1, 2], np.array([-1.0], dtype=np.float32))

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])
weights = st.lists(st.tuples(shapes, dtypes), max_size=6)


def make(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.randn(shape).to(dtype) for i, (shape, dtype) in enumerate(parts)}


@given(weights)
def test_every_tensor_comes_back_as_it_was(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    tensors = make(parts)
    snapshot = Snapshot(3, tensors.items(), PROBE)
    # What travels is the manifest as JSON and the bytes.
    received = Manifest(**snapshot.manifest.as_dict()).views(snapshot.flat.clone())
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


@given(weights)
def test_tensors_do_not_overlap_and_are_aligned(parts: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    manifest = Manifest.of(make(parts))
    flat = torch.zeros(manifest.total_bytes(), dtype=torch.uint8)
    base = flat.data_ptr()
    past = 0
    for view in manifest.views(flat).values():
        if view.numel():
            start = view.data_ptr() - base
            assert start % ALIGNMENT == 0
            assert start >= past
            past = start + view.numel() * view.element_size()
    assert past <= len(flat)


def test_weights_travel_in_the_servers_dtype() -> None:
    snapshot = Snapshot(1, [("w", torch.tensor([1.0, 2.0]))], PROBE, torch.bfloat16)
    assert snapshot.manifest.dtypes == ["bfloat16"]
    assert snapshot.manifest.views(snapshot.flat)["w"].tolist() == [1.0, 2.0]


def test_a_snapshot_is_a_copy_and_reuses_its_buffer() -> None:
    weight = torch.ones(4)
    first = Snapshot(1, [("w", weight)], PROBE)
    weight += 1
    assert first.manifest.views(first.flat)["w"].tolist() == [1.0] * 4
    second = Snapshot(2, [("w", weight)], PROBE, buffer=first.flat)
    assert second.flat.data_ptr() == first.flat.data_ptr()
    assert Snapshot(3, [("w", torch.ones(5))], PROBE, buffer=first.flat).flat.data_ptr() != first.flat.data_ptr()


def test_memory_that_was_taken_ahead_becomes_the_first_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Reserve(most=2)
    monkeypatch.setattr(snapshots, "_reserve", reserve)
    weights = [("w", torch.ones(HUGE))]
    snapshots.expect(weights)
    ahead = reserve.take(4 * HUGE)
    reserve._ready.append(ahead)
    first = Snapshot(1, weights, PROBE)
    assert first.flat.data_ptr() == ahead.data_ptr()
    # The next is ready before it is asked for, and no third is made.
    second = Snapshot(2, weights, PROBE)
    assert second.flat.data_ptr() != ahead.data_ptr()
    assert reserve._made == 2
    assert torch.equal(second.flat, first.flat)


def test_one_changed_byte_changes_the_digest() -> None:
    flat = torch.arange(255, dtype=torch.uint8)
    before = digest_of(flat)
    flat[17] ^= 1
    assert digest_of(flat) != before


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float1 is not a dtype"):
        Manifest(["w"], ["float1"], [[1]]).total_bytes()


def test_float32_masters_travel_in_the_servers_type_and_what_counts_or_masks_in_its_own() -> None:
    weights = {
        "master": torch.tensor([1.0 + 2**-12]),
        "half": torch.ones(2, dtype=torch.float16),
        "tokens_seen": torch.tensor(2**40 + 1),
        "mask": torch.tensor([True, False]),
        "packed": torch.tensor([3], dtype=torch.uint8),
    }
    snapshot = Snapshot(1, weights.items(), PROBE, torch.bfloat16)
    assert snapshot.manifest.dtypes == ["bfloat16", "bfloat16", "int64", "bool", "uint8"]
    sent = snapshot.manifest.views(snapshot.flat)
    assert sent["master"].item() == 1.0
    assert sent["tokens_seen"].item() == 2**40 + 1
    assert sent["mask"].tolist() == [True, False]


@pytest.mark.parametrize(
    "name",
    [
        "module.model.layers.0.q_proj.weight",
        "module._orig_mod.model.layers.0.q_proj.weight",
        "model.layers.0._orig_mod.q_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.q_proj.weight",
        "model.layers.0._checkpoint_wrapped_module.q_proj.weight",
        "base_model.model.model.layers.0.q_proj.weight",
        "module.base_model.model.model.layers.0.q_proj.base_layer.weight",
        "model.layers.0.q_proj.weight",
    ],
)
def test_names_are_those_of_the_checkpoint_whatever_wraps_the_module(name: str) -> None:
    snapshot = Snapshot(1, [(name, torch.arange(3.0))], PROBE)
    assert snapshot.manifest.names == ["model.layers.0.q_proj.weight"]
    assert snapshot.manifest.views(snapshot.flat)["model.layers.0.q_proj.weight"].tolist() == [0, 1, 2]


def test_a_module_of_the_models_own_that_is_called_module_stays() -> None:
    assert Snapshot(1, [("model.module.weight", torch.zeros(1))], PROBE).manifest.names == ["model.module.weight"]


def test_two_names_that_are_one_without_their_wrappers_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"module\.a and a are both a in a checkpoint"):
        Snapshot(1, [("module.a", torch.zeros(1)), ("a", torch.zeros(1))], PROBE)
