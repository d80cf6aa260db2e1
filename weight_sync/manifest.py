"""Where each tensor lies in the one flat buffer that travels. Learner and server compute the same layout from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

ALIGNMENT = 64


@dataclass(frozen=True)
class Manifest:
    """Names (as in a Hugging Face checkpoint), torch's dtypes by name ("float32") and shapes of n tensors, in their
    order in the buffer. Each starts at a multiple of `ALIGNMENT` bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @classmethod
    def of(cls, weights: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Manifest:
        """The manifest of `weights` (tensors by name), those of floating point as `dtype` if given: float32 masters go
        to servers in bfloat16, and a counter or a mask stays what it is."""
        return cls(
            list(weights),
            [str(_sent_as(tensor.dtype, dtype)).removeprefix("torch.") for tensor in weights.values()],
            [list(tensor.shape) for tensor in weights.values()],
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `Manifest(**...)` reads it back."""
        return asdict(self)

    def total_bytes(self) -> int:
        """Bytes of the whole buffer. Raises ValueError for an unknown dtype."""
        return max((end for _, _, end in self._places()), default=0)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor by name, as a view of `flat`: uint8 [total_bytes()], contiguous."""
        return {
            self.names[i]: flat[start:end].view(_dtype(self.dtypes[i])).view(self.shapes[i])
            for i, start, end in self._places()
        }

    def elements(self) -> int:
        """Elements of all tensors, as `runs` takes them: those of more than 8 bytes count as several."""
        return sum((end - start) // min(8, _dtype(self.dtypes[i]).itemsize) for i, start, end in self._places())

    def runs(self) -> list[tuple[int, int, int]]:
        """First byte, byte past the end and bytes of an element (at most 8) of each run of neighbouring tensors whose
        elements have one width. A run begins at a multiple of `ALIGNMENT`; the padding between its tensors is in it."""
        runs: list[tuple[int, int, int]] = []
        for i, start, end in self._places():
            width = min(8, _dtype(self.dtypes[i]).itemsize)
            if runs and runs[-1][2] == width:
                runs[-1] = (runs[-1][0], end, width)
            elif end > start:
                runs.append((start, end, width))
        return runs

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Index, first byte and byte past the end of each tensor."""
        start = 0
        for i, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True)):
            end = start + _dtype(dtype).itemsize * math.prod(shape)
            yield i, start, end
            start = -(-end // ALIGNMENT) * ALIGNMENT


def _sent_as(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    # One byte: quantised, whose values mean nothing in another type.
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > 1 else own


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype of torch")
    return dtype
