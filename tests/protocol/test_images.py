"""An image's arrays come back to the bit, in few bytes; what is no packed array is refused at a bounded cost."""

from __future__ import annotations

import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from slipstream.protocol import codec
from slipstream.protocol.images import MAX_BYTES, Image, ImagePlace, PackedArray, pack, unpack
from tests.kit import group

TYPES = st.sampled_from([np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.uint8)])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_arrays_come_back_to_the_bit(data: st.DataObject) -> None:
    array = data.draw(
        arrays(data.draw(TYPES), data.draw(array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=20)))
    )
    back = unpack(pack(array))
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_processed_pixels_take_a_fraction_of_their_bytes() -> None:
    """Normalised pixels of three channels: 768 values at most, each pixel twice, as Qwen's processors have them."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 3, 1, 64)).repeat(2, axis=2)
    values = ((pixels / 255 - 0.45) / np.array([0.26, 0.27, 0.28])[:, None, None]).astype(np.float32)
    packed = pack(values)
    assert packed.table == 768
    assert len(packed.data) < values.nbytes / 3
    np.testing.assert_array_equal(unpack(packed), values)


@pytest.mark.parametrize(
    "wrong",
    [
        PackedArray("float64", [1], 0, zlib.compress(bytes(8))),
        PackedArray("float32", [2], 0, zlib.compress(bytes(4))),
        PackedArray("float32", [1], 0, zlib.compress(bytes(8))),
        PackedArray("float32", [1], 0, b"no deflated data"),
        PackedArray("float32", [1], 1, zlib.compress(bytes(4) + b"\x01")),
        PackedArray("float32", [1] * 9, 0, zlib.compress(bytes(4))),
        PackedArray("float32", [MAX_BYTES], 0, zlib.compress(bytes(4))),
    ],
)
def test_what_is_no_packed_array_is_refused(wrong: PackedArray) -> None:
    with pytest.raises(ValueError, match="image's array"):
        unpack(wrong)


def test_a_bomb_is_not_inflated() -> None:
    bomb = PackedArray("uint8", [10], 0, zlib.compress(bytes(64 * 1024**2)))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="does not have 10 bytes"):
            unpack(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1024**2
    finally:
        tracemalloc.stop()


def test_a_group_without_images_says_nothing_of_them() -> None:
    plain = group()
    wire = msgspec.msgpack.decode(codec.encode(plain))
    assert "images" not in wire
    assert "images" not in wire["rollouts"][0]["segments"][0]
    plain.images = [Image("hash", 1, {"pixel_values": pack(np.ones((1, 2), np.float32))})]
    plain.rollouts[0].segments[0].images = [ImagePlace(0, 0)]
    back = codec.decode(codec.encode(plain), type(plain))
    assert back.images == plain.images
    assert back.rollouts[0].segments[0].images == [ImagePlace(0, 0)]
