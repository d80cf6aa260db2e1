"""A version of the weights, copied out of the learner's way: one flat buffer on the host and its digest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from blake3 import blake3

from weight_sync.manifest import Manifest
from weight_sync.probe import Probe


class Snapshot:
    """Weights of one policy version with the probe that proves them.

    `flat` is a uint8 tensor on the host. Making it is the only part of a publication that the learner waits for.
    """

    def __init__(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
        dtype: torch.dtype | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """`dtype` is the servers' type; `buffer` is an earlier snapshot's `flat`, used again if it fits."""
        tensors = {name: tensor.detach() for name, tensor in weights}
        self.version = version
        self.probe = probe
        self.manifest = Manifest.of(tensors, dtype)
        size = self.manifest.total_bytes()
        self.flat = buffer if buffer is not None and len(buffer) == size else torch.zeros(size, dtype=torch.uint8)
        for name, view in self.manifest.views(self.flat).items():
            view.copy_(tensors[name])

    @cached_property
    def digest(self) -> bytes:
        return digest_of(self.flat)


def digest_of(flat: torch.Tensor) -> bytes:
    """BLAKE3 of a uint8 tensor on the host, 32 bytes."""
    return blake3(flat.numpy().data).digest()
