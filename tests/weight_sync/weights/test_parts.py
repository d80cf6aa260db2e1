"""Buckets of tensors, and of rows of those that are larger than a bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.parts import NotInParts, Part, joined

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8)


@given(SHAPES, st.sampled_from([1, 64, 200, 1 << 40]))
def test_buckets_hold_every_byte_once_and_are_no_larger_than_asked_or_than_a_row(
    shapes: list[list[int]], max_bytes: int
) -> None:
    weights = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    manifest = Manifest.of(weights)
    flat = torch.zeros(manifest.total_bytes(), dtype=torch.uint8)
    for name, view in manifest.views(flat).items():
        view.copy_(weights[name])
    buckets = manifest.buckets(max_bytes)
    for bucket in buckets:
        rows = [shape[1:] for shape in bucket.manifest.shapes]
        largest_row = max((4 * int(torch.tensor(row).prod()) for row in rows), default=0)
        assert bucket.size <= max(max_bytes, largest_row)
    arrived = dict(joined(bucket.tensors(flat[bucket.start : bucket.end].clone()) for bucket in buckets))
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(arrived[name], weights[name]) for name in weights)


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_what_a_loader_cuts_out_of_parts_is_what_it_cuts_out_of_the_whole(
    rows: int, columns: int, data: st.DataObject
) -> None:
    whole = torch.randn(rows, columns)
    each = data.draw(st.integers(1, rows))
    start, first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    length, width = data.draw(st.integers(1, rows - start)), data.draw(st.integers(1, columns - first))
    loaded = torch.full((length, width), torch.nan)
    for at in range(0, rows, each):
        part = Part.of(whole[at : at + each], at, whole.shape)
        assert part.shape == whole.shape
        assert (part.size(), part.dtype, part.numel()) == (whole.size(), whole.dtype, whole.numel())
        cut = part.narrow(0, start, length)[:, first : first + width].data
        assert cut.shape == loaded.shape
        loaded.copy_(cut)
    assert torch.equal(loaded, whole[start : start + length, first : first + width])


@pytest.mark.parametrize(
    "work", [lambda part: part + 1, lambda part: part.t(), lambda part: part.T, lambda part: part[2], torch.clone]
)
def test_a_loader_that_does_more_is_told_so(work: object) -> None:
    part = Part.of(torch.zeros(2, 3), 0, [4, 3])
    with pytest.raises(NotInParts, match="needs all of it"):
        work(part)  # type: ignore[operator]
