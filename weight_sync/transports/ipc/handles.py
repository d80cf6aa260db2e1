"""A tensor's memory on a GPU, named so that another process can open it: plain values, nothing pickled (I8)."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Handle:
    """What torch's storage says of itself for another process. gpu: uuid. Bytes are base64; sizes are in bytes."""

    gpu: str
    memory: str
    size: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    event_wait: bool


def export(tensor: torch.Tensor, gpu: str) -> Handle:
    """Of a whole storage. To be called once for each: whoever opens it counts for one. Raises RuntimeError."""
    storage: Any = tensor.untyped_storage()
    _, memory, size, offset, counter, counter_offset, event, event_wait = storage._share_cuda_()
    return Handle(gpu, _text(memory), size, offset, _text(counter), counter_offset, _text(event), bool(event_wait))


def opened(handle: Handle, device: torch.device) -> torch.Tensor:
    """uint8 [handle.size], the other process's memory, for as long as the tensor lives. Raises RuntimeError."""
    make: Any = torch.UntypedStorage
    storage = make._new_shared_cuda(
        device.index or 0,
        _bytes(handle.memory),
        handle.size,
        handle.offset,
        _bytes(handle.counter),
        handle.counter_offset,
        _bytes(handle.event),
        handle.event_wait,
    )
    memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return memory


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
