"""Messages between ranks: nested values as bytes, without pickle (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np
import torch

# Tags of types that msgpack does not know, or does not keep apart.
_TENSOR, _ARRAY, _MAPPING, _LIST, _TUPLE, _PLAIN = range(6)


def encode_message(value: Any) -> bytes:
    """Encode tensors on any device, arrays, mappings with plain keys, lists, tuples and plain values, nested in any
    way."""
    return msgspec.msgpack.encode(_tagged(value))


def decode_message(data: bytes | memoryview) -> Any:
    """Decode what `encode_message` encoded; tensors are on the host."""
    return _untagged(msgspec.msgpack.decode(data))


def _tagged(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        held = value.detach().cpu().contiguous()
        name, shape = str(held.dtype).removeprefix("torch."), list(held.shape)
        return [_TENSOR, name, shape, held.reshape(-1).view(torch.uint8).numpy().tobytes()]
    if isinstance(value, np.ndarray):
        return [_ARRAY, value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return [_PLAIN, value.item()]
    if isinstance(value, Mapping):
        return [_MAPPING, [[key, _tagged(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [_TUPLE if isinstance(value, tuple) else _LIST, [_tagged(item) for item in value]]
    return [_PLAIN, value]


def _untagged(tagged: list[Any]) -> Any:
    match tagged:
        case [int() as tag, str(name), list(shape), bytes(data)] if tag == _TENSOR:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            return flat.view(cast(torch.dtype, getattr(torch, name))).reshape(shape)
        case [int() as tag, str(name), list(shape), bytes(data)] if tag == _ARRAY:
            return np.frombuffer(data, dtype=np.dtype(name)).reshape(shape).copy()
        case [int() as tag, list(items)] if tag == _MAPPING:
            return {key: _untagged(item) for key, item in items}
        case [int() as tag, list(items)] if tag == _TUPLE:
            return tuple(_untagged(item) for item in items)
        case [int() as tag, list(items)] if tag == _LIST:
            return [_untagged(item) for item in items]
        case [int(), value]:
            return value
    raise ValueError(f"a message of another kind: {str(tagged)[:80]}")
