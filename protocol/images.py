"""Images as a group carries them: the arrays that the model's processor made of each, packed without loss.

A processed image has few distinct values, since its pixels had 256 in each channel. So an array travels as the table of
its values and an index for each, deflated; where that is no gain, as it is.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

# Types of arrays that processors make.
_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8"), "uint8": np.dtype("|u1")}

# Bytes of one image's arrays, unpacked: 16 million pixels of Qwen's processors.
MAX_BYTES = 512 * 1024**2

# Values that are looked at before the table of all is made, and how many distinct ones may be among them.
_SAMPLE, _FEW = 2**16, 2**12
_MAX_DIMENSIONS = 8

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array.

    Attributes:
        dtype: float32, int64 or uint8.
        table: Number of distinct values that `data` begins with, little-endian; behind them stands the index of each
            value, as uint8 or uint16. 0: `data` has the values themselves.
        data: Deflated.
    """

    dtype: str
    shape: list[Natural]
    table: Natural
    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the array unpacked."""
        return math.prod(self.shape) * (_DTYPES[self.dtype].itemsize if self.dtype in _DTYPES else 1)


class Image(msgspec.Struct, frozen=True):
    """An image as the model sees it.

    Attributes:
        hash: Of its arrays; images of one hash are the same.
        tokens: Number of placeholder tokens that stand for it.
        arrays: Inputs of the network by name, each with the image's own as its first dimension.
    """

    hash: str
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    arrays: dict[str, PackedArray]


class ImagePlace(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a segment that stand for the group's `images[image]`: from `start` on, as many as it has."""

    image: Natural
    start: Natural


def digest(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the hash of an image by its arrays, 32 hexadecimal digits."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:32]


def pack(array: npt.NDArray[Any]) -> PackedArray:
    """Pack an array. Takes about 10 ms for each million values: not on an event loop."""
    values = np.ascontiguousarray(array).astype(_wire_type(array), copy=False)
    shape, flat = list(values.shape), values.reshape(-1)
    plain = PackedArray(array.dtype.name, shape, 0, zlib.compress(flat.tobytes(), 1))
    if values.itemsize < 4 or len(np.unique(_sampled(flat))) > _FEW:
        return plain
    # By their bits: -0.0 and 0.0 are two values, and NaN is one.
    bits = flat.view(f"<u{values.itemsize}")
    table, index = np.unique(bits, return_inverse=True)
    if len(table) > 2**16:
        return plain
    index = index.astype("|u1" if len(table) <= 2**8 else "<u2")
    data = zlib.compress(table.tobytes() + index.tobytes(), 1)
    return PackedArray(array.dtype.name, shape, len(table), data) if len(data) < len(plain.data) else plain


def unpack(packed: PackedArray) -> npt.NDArray[Any]:
    """Return the array, to the bit. Raises `ValueError` if it is not what `pack` makes."""
    dtype = _DTYPES.get(packed.dtype)
    if dtype is None or len(packed.shape) > _MAX_DIMENSIONS or packed.nbytes > MAX_BYTES:
        raise ValueError(f"an image's array is of type {packed.dtype!r:.40} and shape {packed.shape[:_MAX_DIMENSIONS]}")
    count = math.prod(packed.shape)
    wide: np.dtype[Any] = np.dtype("|u1" if packed.table <= 2**8 else "<u2")
    size = packed.table * dtype.itemsize + count * (wide if packed.table else dtype).itemsize
    try:
        opened = zlib.decompressobj()
        data = opened.decompress(packed.data, size + 1)
    except zlib.error as error:
        raise ValueError(f"an image's array cannot be unpacked: {error}") from None
    if len(data) != size or packed.table > 2**16:
        raise ValueError(f"an image's array of shape {packed.shape} does not have {size} bytes")
    values: npt.NDArray[Any] = np.frombuffer(data, dtype, packed.table or count)
    if not packed.table:
        return values.reshape(packed.shape)
    index: npt.NDArray[Any] = np.frombuffer(data, wide, offset=values.nbytes)
    if count and int(index.max()) >= packed.table:
        raise ValueError("an image's array names values that its table does not have")
    found: npt.NDArray[Any] = values[index].reshape(packed.shape)
    return found


def _wire_type(array: npt.NDArray[Any]) -> np.dtype[Any]:
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"an image's arrays are of type {', '.join(_DTYPES)}, not {array.dtype}")
    return _DTYPES[array.dtype.name]


def _sampled(flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return flat[:: max(1, len(flat) // _SAMPLE)]
