"""Deltas: bit for bit what a whole snapshot would be, smaller, and found out where they do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.weight_sync.transports.http.chunks import ChunkList
from slipstream.weight_sync.weights import delta_codec
from slipstream.weight_sync.weights.delta_base import STEPS_KEPT, DeltaHistory
from slipstream.weight_sync.weights.delta_codec import Delta, DeltaError, apply, encode_delta
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.snapshot import Snapshot
from tests.kit.sync import probe

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex128,
]


def flat_of(manifest: Manifest, seed: int) -> torch.Tensor:
    """Random bits in every element, NaNs with payloads among them; zeros between the tensors."""
    generator = np.random.default_rng(seed)
    flat = torch.zeros(manifest.total_bytes(), dtype=torch.uint8)
    for view in manifest.views(flat).values():
        if view.numel() == 0:
            continue
        if view.dtype == torch.bool:
            view.copy_(torch.from_numpy(generator.integers(0, 2, view.shape).astype(bool)))
        else:
            raw = torch.from_numpy(generator.integers(0, 256, view.numel() * view.itemsize, dtype=np.uint8))
            view.copy_(raw.view(view.dtype).view(view.shape))
    return flat


def changed(manifest: Manifest, base: torch.Tensor, share: float, near: bool, seed: int) -> torch.Tensor:
    """`base` with about `share` of its elements changed: in the last place if `near`, else to anything."""
    generator = np.random.default_rng(seed)
    flat = base.clone()
    for view in manifest.views(flat).values():
        if view.numel() == 0:
            continue
        raw = view.reshape(-1).view(torch.uint8).view(-1, view.itemsize)
        where = torch.from_numpy(generator.random(len(raw)) < share)
        if near or view.dtype == torch.bool:
            raw[where, 0] ^= 1
        else:
            raw[where] = torch.from_numpy(generator.integers(0, 256, (int(where.sum()), view.itemsize), dtype=np.uint8))
    return flat


def laid_on(delta: Delta, base: torch.Tensor, manifest: Manifest) -> torch.Tensor:
    flat = base.clone()
    apply(delta.payload, flat, manifest)
    return flat


layouts = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), min_size=0, max_size=3)), min_size=0, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(
    layout=layouts,
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9, 1.0]),
    near=st.booleans(),
    piece=st.sampled_from([64, 4096, delta_codec.PIECE_BYTES]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_delta_gives_every_bit_of_the_whole(
    layout: list[tuple[torch.dtype, list[int]]], share: float, near: bool, piece: int, seed: int
) -> None:
    manifest = Manifest(
        [str(i) for i in range(len(layout))],
        [str(dtype).removeprefix("torch.") for dtype, _ in layout],
        [shape for _, shape in layout],
    )
    base = flat_of(manifest, seed)
    new = changed(manifest, base, share, near, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_codec, "PIECE_BYTES", piece)
        delta = encode_delta(base, new, manifest)
        assert torch.equal(laid_on(delta, base, manifest), new)
    assert 0 <= delta.share <= 1
    assert (delta.changed == 0) == torch.equal(base, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_delta_keeps_nan_payloads_and_the_sign_of_zero(dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    nan = torch.tensor([float("nan")], dtype=dtype).view(bits)
    old = torch.stack([torch.zeros(1, dtype=bits), nan, nan, nan + 1]).view(dtype).flatten()
    minus_zero = torch.tensor([-0.0], dtype=dtype).view(bits)
    new = torch.stack([minus_zero, nan + 1, nan, minus_zero]).view(dtype).flatten()
    manifest = Manifest.of({"w": old})
    delta = encode_delta(old.view(torch.uint8), new.view(torch.uint8), manifest)
    assert torch.equal(laid_on(delta, old.view(torch.uint8), manifest), new.view(torch.uint8))
    assert (delta.changed, delta.elements) == (3, 4)


def test_places_far_apart_and_steps_of_all_sizes_survive() -> None:
    old = torch.zeros(3_000_000, dtype=torch.float32)
    new = old.clone()
    words = new.view(torch.int32)
    words[[0, 254, 255, 511, 700_000, 2_999_999]] = torch.tensor([1, -1, 127, -128, 2**31 - 1, -(2**31)]).int()
    words[1000:1300] = torch.arange(300).int() * 1000 - 32768 - 1000
    manifest = Manifest.of({"w": old})
    delta = encode_delta(old.view(torch.uint8), new.view(torch.uint8), manifest)
    assert torch.equal(laid_on(delta, old.view(torch.uint8), manifest), new.view(torch.uint8))
    assert len(delta.payload) < 4000


def test_a_step_of_a_bf16_run_at_a_low_rate_takes_about_as_many_hundredths_as_values_that_change() -> None:
    old = (torch.randn(400_000, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    new = old.clone()
    where = torch.rand(400_000, generator=torch.Generator().manual_seed(1)) < 0.015
    new.view(torch.int16)[where] += 1
    delta = encode_delta(old.view(torch.uint8), new.view(torch.uint8), Manifest.of({"w": old}))
    assert delta.share == pytest.approx(0.015, abs=0.001)
    assert len(delta.payload) / old.nbytes < 0.017


@pytest.mark.parametrize("cut", [1, 8, 40])
def test_a_payload_with_a_part_dropped_is_refused(cut: int) -> None:
    manifest = Manifest(["w"], ["bfloat16"], [[1000]])
    base = flat_of(manifest, 0)
    delta = encode_delta(base, changed(manifest, base, 0.1, False, 1), manifest)
    with pytest.raises(DeltaError, match="does not fit"):
        apply(delta.payload[:-cut].clone(), base.clone(), manifest)


def test_a_payload_that_is_not_one_is_refused_whatever_its_bytes() -> None:
    manifest = Manifest(["w"], ["float32"], [[1000]])
    base = flat_of(manifest, 0)
    delta = encode_delta(base, changed(manifest, base, 0.1, False, 1), manifest)
    generator = np.random.default_rng(2)
    refused = 0
    for _ in range(200):
        payload = delta.payload.clone()
        payload[int(generator.integers(0, 32))] ^= int(generator.integers(1, 256))
        try:
            apply(payload, base.clone(), manifest)
        except DeltaError:
            refused += 1
    assert refused > 150


def test_a_delta_on_another_base_is_found_by_the_chunks_digests() -> None:
    manifest = Manifest(["w"], ["bfloat16"], [[5000]])
    base = flat_of(manifest, 0)
    new = changed(manifest, base, 0.02, True, 1)
    chunks = ChunkList.of(new, 1000)
    delta = encode_delta(base, new, manifest)
    other = base.clone()
    other[4321] ^= 1
    apply(delta.payload, other, manifest)
    found = ChunkList.of(other, 1000).digests
    assert [index for index, digest in enumerate(found) if digest != chunks.digests[index]] == [4]
    assert ChunkList.of(laid_on(delta, base, manifest), 1000) == chunks


def test_a_buffer_of_another_size_is_refused() -> None:
    manifest = Manifest(["w"], ["float32"], [[4]])
    with pytest.raises(DeltaError, match="15 x"):
        encode_delta(torch.zeros(15, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8), manifest)


def snapshot(version: int, weights: torch.Tensor) -> Snapshot:
    return Snapshot(version, [("w", weights)], probe())


def weights_of(version: int, size: int = 10_000) -> torch.Tensor:
    weights = torch.ones(size)
    weights[: version * 10] += version
    return weights


class TestBook:
    def test_it_leads_from_any_of_the_last_versions_to_the_newest_though_buffers_are_filled_again(self) -> None:
        history = DeltaHistory()
        shots = [snapshot(version, weights_of(version)) for version in range(4)]
        flats = [shot.flat.clone() for shot in shots]
        for shot in shots:
            history.find_path(None, shot)
            assert history.find_path(None, shot) is None
            if shot is not shots[-1]:
                shot.flat.fill_(9)
        for base in range(3):
            way = history.find_path(str(base), shots[3])
            assert way is not None
            assert len(way.payloads) == 3 - base
            flat = flats[base].clone()
            for payload in way.payloads:
                apply(payload, flat, shots[3].manifest)
            assert torch.equal(flat, flats[3])
            assert way.total_bytes < 0.05 * len(flat)

    def test_there_is_no_way_from_a_version_that_is_not_known_or_to_one_that_was_overtaken(self) -> None:
        history = DeltaHistory()
        shots = [snapshot(version, weights_of(version)) for version in range(3)]
        history.find_path(None, shots[0])
        history.find_path(None, shots[2])
        assert history.find_path("1", shots[2]) is None
        assert history.find_path("7", shots[2]) is None
        assert history.find_path("0", shots[1]) is None
        assert history.find_path("0", shots[2]) is not None

    def test_there_is_none_where_everything_is_no_larger(self) -> None:
        history = DeltaHistory()
        generator = torch.Generator().manual_seed(0)
        history.find_path(None, snapshot(0, torch.randn(1000, generator=generator)))
        assert history.find_path("0", snapshot(1, torch.randn(1000, generator=generator))) is None

    def test_other_shapes_begin_anew(self) -> None:
        history = DeltaHistory()
        history.find_path(None, snapshot(0, torch.ones(4000)))
        assert history.find_path("0", snapshot(1, torch.ones(4001))) is None
        assert history.find_path("1", snapshot(2, torch.ones(4001))) is not None

    def test_it_keeps_so_many_steps(self) -> None:
        history = DeltaHistory()
        for version in range(STEPS_KEPT + 2):
            newest = snapshot(version, weights_of(version))
            history.find_path(None, newest)
        assert history.find_path("0", newest) is None
        assert history.find_path("1", newest) is not None
