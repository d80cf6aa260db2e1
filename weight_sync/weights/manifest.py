"""Where each tensor lies in the one flat buffer that travels.

Learner and server compute the same layout from one `Manifest`. Its names are a checkpoint's, whatever wraps the module
that the tensors are taken from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from slipstream.weight_sync.weights.parts import Part

ALIGNMENT = 64

# An index of a tensor: some of its rows, or all of it.
Rows: TypeAlias = slice | EllipsisType

# torch.compile, FSDP, activation checkpointing, and peft around a layer: anywhere in a name.
_AROUND = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}

# DDP and peft around a model: at its beginning.
_BEFORE = (["module"], ["base_model", "model"])


@dataclass(frozen=True)
class Manifest:
    """The layout of tensors in a flat buffer, in their order. Each starts at a multiple of `ALIGNMENT` bytes.

    Attributes:
        names: Names as in a Hugging Face checkpoint.
        dtypes: torch's names of their types, such as "float32".
        shapes: Their shapes.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @classmethod
    def of(cls, weights: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Manifest:
        """Make the manifest of tensors by name.

        Args:
            dtype: Type in which floating-point tensors are sent, as float32 masters go to servers in bfloat16; None:
                their own. Others, such as counters and masks, keep theirs.
        """
        return cls(
            list(weights),
            [str(_sent_as(tensor.dtype, dtype)).removeprefix("torch.") for tensor in weights.values()],
            [list(tensor.shape) for tensor in weights.values()],
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; `Manifest(**...)` reads them back."""
        return {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}

    def stand_ins(self) -> dict[str, torch.Tensor]:
        """Return tensors without memory, of the same names, shapes and types."""
        return {
            name: torch.empty(shape, dtype=_dtype(dtype), device="meta")
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        }

    def total_bytes(self) -> int:
        """Return the bytes of the whole buffer. Raises ValueError for an unknown dtype."""
        return max((end for _, _, end in self._places()), default=0)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor by name, as a view of `flat`: uint8 [total_bytes()], contiguous."""
        return {
            self.names[i]: flat[start:end].view(_dtype(self.dtypes[i])).view(self.shapes[i])
            for i, start, end in self._places()
        }

    def elements(self) -> int:
        """Return the elements of all tensors; one of more than 8 bytes counts as several, as in `runs`."""
        return sum((end - start) // min(8, _dtype(self.dtypes[i]).itemsize) for i, start, end in self._places())

    def runs(self) -> list[tuple[int, int, int]]:
        """Find runs of neighbouring tensors whose elements have the same width.

        Returns:
            First byte, byte past the end, and bytes of an element (at most 8) of each run. A run begins at a multiple
            of `ALIGNMENT` and includes the padding between its tensors.
        """
        runs: list[tuple[int, int, int]] = []
        for i, start, end in self._places():
            width = min(8, _dtype(self.dtypes[i]).itemsize)
            if runs and runs[-1][2] == width:
                runs[-1] = (runs[-1][0], end, width)
            elif end > start:
                runs.append((start, end, width))
        return runs

    def buckets(self, max_bytes: int) -> list[Bucket]:
        """Cut the buffer into buckets of at most `max_bytes`: between tensors, and between rows of larger ones. A row
        that is larger has its own."""
        made: list[Bucket] = []
        cuts: list[tuple[int, int, int, int]] = []  # first tensor, the one past the last, first byte, byte past the end

        def close() -> None:
            for first, last, start, end in cuts:
                part = Manifest(self.names[first:last], self.dtypes[first:last], self.shapes[first:last])
                made.append(Bucket(part, start, end))
            cuts.clear()

        for i, start, end in self._places():
            if end - start > max_bytes and self.shapes[i]:
                close()
                made += self._rows(i, start, max_bytes)
            elif cuts and end - cuts[0][2] <= max_bytes:
                cuts[0] = (cuts[0][0], i + 1, cuts[0][2], end)
            else:
                close()
                cuts.append((i, i + 1, start, end))
        close()
        return made

    def _rows(self, i: int, start: int, max_bytes: int) -> Iterator[Bucket]:
        """Cut one tensor between its rows."""
        count, *rest = self.shapes[i]
        row_bytes = _dtype(self.dtypes[i]).itemsize * math.prod(rest)
        each = max(1, max_bytes // row_bytes)
        for first in range(0, count, each):
            rows = min(each, count - first)
            part = Manifest([self.names[i]], [self.dtypes[i]], [[rows, *rest]])
            begins = start + first * row_bytes
            yield Bucket(part, begins, begins + rows * row_bytes, first, self.shapes[i])

    def rows_between(self, first: int, last: int) -> dict[str, Rows]:
        """Return the rows that have bytes from `first` to before `last` of the buffer, by tensor; all of a scalar."""
        found: dict[str, Rows] = {}
        for i, start, end in self._places():
            low, high = max(start, first), min(end, last)
            if low < high:
                row_bytes = (end - start) // self.shapes[i][0] if self.shapes[i] else 0
                rows = slice((low - start) // row_bytes, -(-(high - start) // row_bytes)) if row_bytes else ...
                found[self.names[i]] = rows
        return found

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Yield index, first byte and byte past the end of each tensor."""
        start = 0
        for i, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True)):
            end = start + _dtype(dtype).itemsize * math.prod(shape)
            yield i, start, end
            start = -(-end // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Bucket:
    """Neighbouring tensors that travel together, or rows of a single one.

    Attributes:
        manifest: Their layout within the bucket.
        start: Their first byte in the whole flat buffer.
        end: The byte past their last one.
        first: Number of the first row.
        shape: Shape of the tensor that the rows belong to; None where tensors are whole.
    """

    manifest: Manifest
    start: int
    end: int
    first: int = 0
    shape: list[int] | None = None

    @property
    def size(self) -> int:
        """Bytes of the bucket."""
        return self.end - self.start

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor by name, as a view of `buffer`: uint8 [size]; rows of one as a `Part`."""
        views = self.manifest.views(buffer)
        if self.shape is None:
            return views
        return {name: Part.of(rows, self.first, self.shape) for name, rows in views.items()}


def _sent_as(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    # One byte an element is a quantised tensor, whose values mean nothing in another type.
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > 1 else own


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype of torch")
    return dtype


def unwrapped(name: str) -> str:
    """Return `name` without what wrappers of the module put into it."""
    parts = [part for part in name.split(".") if part not in _AROUND]
    while before := next((one for one in _BEFORE if parts[: len(one)] == one and len(parts) > len(one)), None):
        parts = parts[len(before) :]
    return ".".join(parts)


def check_distinct(names: Iterable[str]) -> None:
    """Raise ValueError if two of `names` are the same without what wrappers put into them."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unwrapped(name), name)
        if other != name:
            raise ValueError(f"{other} and {name} are both {unwrapped(name)} in a checkpoint: publish one of them")
