"""Where each tensor lies in the one flat buffer that travels: learner and server compute the same layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

ALIGNMENT = 64


@dataclass(frozen=True)
class Manifest:
    """Names (Hugging Face's), dtypes ("float32") and shapes of the tensors, in their order in the buffer."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @classmethod
    def of(cls, weights: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Manifest:
        """The manifest of `weights`, as `dtype` where given."""
        return cls(
            list(weights),
            [str(dtype or tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
            [list(tensor.shape) for tensor in weights.values()],
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def total_bytes(self) -> int:
        return max((end for _, _, end in self._places()), default=0)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor as a view of `flat`, a uint8 tensor of `total_bytes()`."""
        return {
            self.names[i]: flat[start:end].view(_dtype(self.dtypes[i])).view(self.shapes[i])
            for i, start, end in self._places()
        }

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Index, first and past-the-end byte of each tensor."""
        start = 0
        for i, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True)):
            end = start + _dtype(dtype).itemsize * math.prod(shape)
            yield i, start, end
            start = -(-end // ALIGNMENT) * ALIGNMENT


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype of torch")
    return dtype
