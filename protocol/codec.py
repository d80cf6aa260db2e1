"""msgpack for data, JSON for control, one error type for anything that does not decode.

Arrays travel as `[dtype, length, little-endian bytes]`, and decode without a copy into read-only arrays.

Decoding hostile input raises `DecodeError`, in time and memory linear in the input, since msgspec checks every
length against what is left. A real group takes about twice its size; the worst is a body of one-byte empty
containers, at under 100 bytes for each: a listener bounds its bodies before it decodes them.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

_NOT_DECODABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError)
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
    if dtype is None:
        raise ValueError(f"an array's dtype is one of {', '.join(_DTYPES)}")
    if not isinstance(data, bytes) or type(length) is not int or length * dtype.itemsize != len(data):
        raise ValueError(f"an array's length does not match its bytes ({dtype_name})")
    if dtype.kind == "b" and data.strip(b"\x00\x01"):
        raise ValueError("a bool array holds bytes other than 0 and 1")
    return np.frombuffer(data, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
# msgspec 0.22 crashes the process where two threads make their first decoder of a nested Struct at one time.
_making = threading.Lock()


def encode(message: Any) -> bytes:
    """msgpack of a message."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message of type `kind` in msgpack `data`; raises `DecodeError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except _NOT_DECODABLE as error:
        raise _refusal(kind, error) from error


def encode_json(message: Any) -> bytes:
    """JSON of a control message."""
    return msgspec.json.encode(message)


def decode_json(data: bytes, kind: Any) -> Any:
    """The control message of type `kind` in JSON `data`; raises `DecodeError`."""
    decoder = _json_decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _json_decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)
    except _NOT_DECODABLE as error:
        raise _refusal(kind, error) from error


def _refusal(kind: Any, error: Exception) -> DecodeError:
    # msgspec quotes an unknown enum value whole, and this text is sent back to whoever sent the bytes.
    return DecodeError(f"not a {getattr(kind, '__name__', kind)}: {str(error)[:300]}")
