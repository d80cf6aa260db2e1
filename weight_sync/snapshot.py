"""One version of the weights, copied out of the learner's way: a flat buffer on the host, its manifest and digest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from blake3 import blake3

from weight_sync.manifest import Manifest
from weight_sync.probe import Probe


class Snapshot:
    """The weights of one policy version, and the probe that proves them.

    flat: uint8 [manifest.total_bytes()] on the host. Making it is the only part of a publication that the learner
    waits for.
    """

    def __init__(
        self,
        version: int,
        weights: Iterable[tuple[str, torch.Tensor]],
        probe: Probe,
        dtype: torch.dtype | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        """weights: names and tensors as in a checkpoint, on any device. dtype: the servers', if not the weights' own.
        buffer: an earlier snapshot's `flat`, overwritten if it has the size."""
        tensors = {name: tensor.detach() for name, tensor in weights}
        self.version = version
        self.probe = probe
        self.manifest = Manifest.of(tensors, dtype)
        size = self.manifest.total_bytes()
        self.flat = buffer if buffer is not None and len(buffer) == size else torch.zeros(size, dtype=torch.uint8)
        for name, view in self.manifest.views(self.flat).items():
            view.copy_(tensors[name])

    @property
    def label(self) -> str:
        """The version as vLLM reports it with each sampled token."""
        return str(self.version)

    @cached_property
    def digest(self) -> bytes:
        """`digest_of(flat)`."""
        return digest_of(self.flat)


def digest_of(flat: torch.Tensor) -> bytes:
    """BLAKE3 of a uint8 tensor on the host: 32 bytes."""
    return blake3(flat.numpy().data).digest()
