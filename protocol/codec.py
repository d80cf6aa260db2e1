"""msgpack for data, JSON for control, one error type for anything that does not decode.

Arrays travel as `[dtype, length, little-endian bytes]`. Decoding hostile input raises `DecodeError`; it
allocates no more than a small multiple of the input, since msgspec checks every length against what is left.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_DTYPES = {"<i4": np.dtype("<i4"), "<f4": np.dtype("<f4"), "|b1": np.dtype("|b1")}


class DecodeError(ValueError):
    """Bytes that are not the message that was expected."""


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
    if dtype is None or not isinstance(data, bytes) or length != len(data) // dtype.itemsize:
        raise ValueError(f"bad array: dtype {dtype_name!r}, length {length!r}")
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no whole number of {dtype_name}")
    if dtype.kind == "b" and data.strip(b"\x00\x01"):
        raise ValueError("a bool array holds bytes other than 0 and 1")
    return np.frombuffer(data, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(message: Any) -> bytes:
    """msgpack of a message."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message of type `kind` in msgpack `data`; raises `DecodeError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DecodeError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def encode_json(message: Any) -> bytes:
    """JSON of a control message."""
    return msgspec.json.encode(message)


def decode_json(data: bytes, kind: Any) -> Any:
    """The control message of type `kind` in JSON `data`; raises `DecodeError`."""
    decoder = _json_decoders.get(kind)
    if decoder is None:
        decoder = _json_decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DecodeError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error
