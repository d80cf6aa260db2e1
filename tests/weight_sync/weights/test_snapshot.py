"""A snapshot is compared with the weights that it was copied from, a part at each publication."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.weight_sync.weights import snapshot as snapshots
from slipstream.weight_sync.weights.checksum import checksum_of
from slipstream.weight_sync.weights.snapshot import Snapshot, SnapshotDamaged
from tests.kit.sync import probe

WEIGHTS = {
    "embed": torch.randn(64, 16),
    "norm": torch.randn(16),
    "scale": torch.tensor(0.5),
    "head": torch.randn(16, 64).t(),  # not contiguous
    "none": torch.empty(0, 4),
    "codes": torch.arange(-8, 8, dtype=torch.int8),
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MIN_CHECKED_BYTES", 256)


def taken(version: int, dtype: torch.dtype) -> Snapshot:
    return Snapshot(version, WEIGHTS.items(), probe(), dtype)


def rounds(dtype: torch.dtype) -> range:
    """Versions in a row that check everything."""
    return range(-(-taken(0, dtype).manifest.total_bytes() // 256) + len(WEIGHTS))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_that_is_right_passes(dtype: torch.dtype) -> None:
    for version in rounds(dtype):
        taken(version, dtype).check()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "none"])
def test_whatever_is_damaged_is_found_within_a_round(name: str, dtype: torch.dtype) -> None:
    found = []
    for version in rounds(dtype):
        copy = taken(version, dtype)
        view = copy.manifest.views(copy.flat)[name]
        view.view(torch.uint8 if view.ndim else view.dtype).reshape(-1)[-1].bitwise_xor_(
            1
        ) if view.ndim else view.neg_()
        try:
            copy.check()
        except SnapshotDamaged as error:
            found.append(str(error))
    assert len(found) >= 1
    assert all(f"differs from the learner's own weights in {name}: " in text for text in found)


@pytest.mark.usefixtures("small_parts")
def test_rows_that_are_exchanged_in_the_copy_are_found_within_a_round() -> None:
    """The digest is the copy's, and so does not see it."""
    found = 0
    for version in rounds(torch.float32):
        copy = taken(version, torch.float32)
        rows = copy.manifest.views(copy.flat)["embed"]
        rows[[3, 4]] = rows[[4, 3]]
        try:
            copy.check()
        except SnapshotDamaged:
            found += 1
    assert found >= 1


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=40), st.data())
def test_a_sum_knows_each_bit_and_each_place(values: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    bit = data.draw(st.integers(0, 31))
    before = torch.tensor(values, dtype=torch.int32)
    other = before.clone()
    other[place] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
    assert not torch.equal(checksum_of(before), checksum_of(other))
    for place, (one, two) in enumerate(pairwise(values)):
        if one != two:
            order = list(range(len(values)))
            order[place], order[place + 1] = place + 1, place
            assert not torch.equal(checksum_of(before), checksum_of(before[order]))
