"""Encodes and decodes messages: msgpack for data, JSON for control, one error for anything that does not decode.

Arrays travel as `[dtype, length, little-endian bytes]`, and decode without a copy into read-only arrays.

Decoding hostile input raises `DecodeError`, in time and memory linear in the input, since msgspec checks every
length against what is left. A real group takes about twice its size; the worst is a body of one-byte empty
containers, at under 100 bytes for each. A listener bounds its bodies, and of msgpack their `shape`, before it decodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_NOT_DECODABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError)
_DTYPES = {name: np.dtype(name) for name in ("<i4", "<f4", "|b1", "|u1", "<u2")}


class DecodeError(ValueError):
    """The bytes are not the expected message."""


class Shape(NamedTuple):
    """Shape of a msgpack value: `items`, all values and keys; `containers`, the lists and maps among them; `depth`, how
    deep these are nested."""

    items: int
    containers: int
    depth: int


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        wire = value.astype(value.dtype.newbyteorder("<"), copy=False)
        if wire.dtype.str not in _DTYPES:
            raise TypeError(f"arrays of {value.dtype} are not part of the protocol")
        return [wire.dtype.str, len(wire), wire.tobytes()]
    raise TypeError(f"{type(value).__name__} is not part of the protocol")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray and getattr(kind, "__origin__", kind) is not np.ndarray:
        raise TypeError(f"{kind} is not part of the protocol")
    return _array(value)


def _array(value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("an array is [dtype, length, bytes]")
    dtype_name, length, data = value
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ValueError(f"an array's dtype is one of {', '.join(_DTYPES)}")
    if not isinstance(data, bytes) or type(length) is not int or length * dtype.itemsize != len(data):
        raise ValueError(f"an array's length does not match its bytes ({dtype_name})")
    if dtype.kind == "b" and data.strip(b"\x00\x01"):
        raise ValueError("a bool array holds bytes other than 0 and 1")
    return np.frombuffer(data, dtype=dtype)


class _Head(NamedTuple):
    """Meaning of a value's first byte: its length, or the width of the length that follows; and for a container the
    values in each entry, else 0. https://github.com/msgpack/msgpack/blob/master/spec.md"""

    length: int = 0
    width: int = 0
    each: int = 0


def _heads() -> list[_Head]:
    heads = [_Head()] * 256  # numbers below 128 and above -33, nil, false, true
    heads[0x80:0x90] = [_Head(length, each=2) for length in range(16)]
    heads[0x90:0xA0] = [_Head(length, each=1) for length in range(16)]
    heads[0xA0:0xC0] = [_Head(length) for length in range(32)]
    for power in range(3):
        heads[0xC4 + power] = heads[0xD9 + power] = _Head(width=2**power)  # bytes, text
        heads[0xC7 + power] = _Head(width=2**power)  # extension
    for power in range(2):
        heads[0xDC + power] = _Head(width=2 ** (power + 1), each=1)
        heads[0xDE + power] = _Head(width=2 ** (power + 1), each=2)
    heads[0xCA], heads[0xCB] = _Head(4), _Head(8)  # floats
    for power in range(4):
        heads[0xCC + power] = heads[0xD0 + power] = _Head(2**power)  # integers
    for power in range(5):
        heads[0xD4 + power] = _Head(1 + 2**power)  # extensions of fixed length, with their type
    return heads


_HEADS = _heads()
_EXTENSION = dict.fromkeys((0xC7, 0xC8, 0xC9), 1)  # the type, after the length
# Bytes of a value of fixed length, by its first; 0 for the others.
_SKIP = [0 if head.width or head.each else 1 + head.length for head in _HEADS]

_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
# msgspec 0.22 crashes the process if two threads make their first decoder of a nested Struct at the same time.
_making = threading.Lock()


def encode(message: Any) -> bytes:
    """Return a message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a message of type `kind` from msgpack. Raises `DecodeError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except _NOT_DECODABLE as error:
        raise _refusal(kind, error) from error


def shape(data: bytes, limit: Shape) -> Shape:
    """Measure the shape of msgpack without building any value.

    Whether it is the expected message, and whether more bytes follow, is for the decoder to say.

    Args:
        data: msgpack.
        limit: Reading stops as soon as one of its bounds is exceeded, by what a container says that it holds.

    Raises:
        DecodeError: `data` ends within a value.
    """
    max_items, max_containers, max_depth = limit
    position = items = containers = depth = 0
    outer: list[int] = []  # values still to come in the containers around this one
    left = 1
    try:
        while True:
            while left:
                left -= 1
                items += 1
                first = data[position]
                skip = _SKIP[first]
                if skip:
                    position += skip
                    continue
                length, width, each = _HEADS[first]
                position += 1
                if width:
                    length = int.from_bytes(data[position : position + width])
                    position += width
                if each:
                    outer.append(left)
                    left = length * each
                    containers += 1
                    depth = max(depth, len(outer))
                    if items + left > max_items or containers > max_containers or depth > max_depth:
                        return Shape(items + left, containers, depth)
                else:
                    position += length + _EXTENSION.get(first, 0)
            if not outer:
                break
            left = outer.pop()
        if position > len(data):
            raise IndexError
    except IndexError:
        raise DecodeError(f"not msgpack: it ends within a value, after {len(data)} bytes") from None
    return Shape(items, containers, depth)


def encode_json(message: Any) -> bytes:
    """Return a control message as JSON."""
    return msgspec.json.encode(message)


def decode_json(data: bytes, kind: Any) -> Any:
    """Decode a control message of type `kind` from JSON. Raises `DecodeError`."""
    decoder = _json_decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _json_decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)
    except _NOT_DECODABLE as error:
        raise _refusal(kind, error) from error


def read_json_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the lines of a file that are a `kind`, one in memory at a time: a kill cuts the last one short.

    A file that is not there, or cannot be read, has none.
    """
    decoder = msgspec.json.Decoder(kind)
    if not path.is_file():
        return
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            with suppress(msgspec.DecodeError):
                yield decoder.decode(line)


def error_message(body: bytes, characters: int = 500) -> str:
    """Return the message in the body of an HTTP error, for people: `error.message` as OpenAI has it, or
    `detail` or `message`. A body that is not JSON is text already; of JSON without a message nothing is shown."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body[:characters].decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return found[:characters] if isinstance(found, str) else "an error without a message"


def _refusal(kind: Any, error: Exception) -> DecodeError:
    # msgspec quotes an unknown enum value in full, and this text is sent back to the sender.
    return DecodeError(f"not a {getattr(kind, '__name__', kind)}: {str(error)[:300]}")
