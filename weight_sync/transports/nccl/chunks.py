"""The wire of vLLM's NCCL engine, packed: tensors one behind the other, cut where a chunk passes a size.

Both ends cut by themselves, so order, types and shapes must be the same (vllm 0.32, `packed_tensor.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weight_sync.manifest import Manifest
from weight_sync.weights.snapshot import Snapshot


@dataclass(frozen=True)
class Chunk:
    """Tensors by name that travel as one broadcast of `size` bytes."""

    names: list[str]
    size: int


def wire_order(manifest: Manifest) -> Manifest:
    """The same tensors, those of wide types first: packed without gaps, each then lies where its type may be read.

    Within a type they keep their order, so that the parts of a fused layer stay together.
    """
    widths = [getattr(torch, dtype).itemsize for dtype in manifest.dtypes]
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    return Manifest(
        [manifest.names[i] for i in order],
        [manifest.dtypes[i] for i in order],
        [manifest.shapes[i] for i in order],
    )


def chunks(manifest: Manifest, most_bytes: int) -> Iterator[Chunk]:
    """As vLLM cuts: a chunk is closed by the tensor with which it passes `most_bytes`."""
    names: list[str] = []
    size = 0
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        names.append(name)
        size += getattr(torch, dtype).itemsize * math.prod(shape)
        if size > most_bytes:
            yield Chunk(names, size)
            names, size = [], 0
    if names:
        yield Chunk(names, size)


def fill(buffer: torch.Tensor, chunk: Chunk, snapshot: Snapshot) -> torch.Tensor:
    """Copy the chunk's tensors into `buffer`, uint8 on any device, on the current stream; returns the part filled."""
    views = snapshot.manifest.views(snapshot.flat)
    start = 0
    for name in chunk.names:
        data = views[name].reshape(-1).view(torch.uint8)
        buffer[start : start + len(data)].copy_(data, non_blocking=True)
        start += len(data)
    return buffer[:start]
