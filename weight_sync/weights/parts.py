"""Rows of a tensor that is larger than a bucket, loaded before the others have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

# What may be asked of a tensor without its content.
_FACTS = {"size", "dim", "numel", "nelement", "element_size", "is_floating_point", "stride", "__len__", "__hash__"}

# Attributes of a tensor that are tensors.
_VIEWS = {"T", "H", "mT", "mH", "real", "imag"}


class NotInParts(Exception):
    """A loader does more with a tensor than to narrow and copy it.

    Attributes:
        name: Of the tensor, "" where it is not known.
    """

    def __init__(self, what: str, name: str = "") -> None:
        super().__init__(f"{name or 'a tensor'} is loaded by {what}, which needs all of it")
        self.what = what
        self.name = name


class Part(torch.Tensor):
    """Some rows (along the first dimension) of a tensor, with the whole tensor's shape.

    A loader may narrow it, and copy from it: then the rows that are held are copied to their place.

    Attributes:
        held: The rows.
        first: Number of the first one.
    """

    held: torch.Tensor
    first: int

    @staticmethod
    def of(held: torch.Tensor, first: int, shape: Iterable[int]) -> Part:
        """Make a part of a tensor of `shape`."""
        whole = torch.empty(tuple(shape), dtype=held.dtype, device="meta")
        part: Part = torch.Tensor._make_subclass(Part, whole)
        part.held, part.first = held, first
        return part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", str(func)), dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if name == "copy_" and isinstance(args[1], Part):
                target, part = args[0], args[1]
                target[part.first : part.first + len(part.held)].copy_(part.held, **named)
                return target
            part = args[0]
            if isinstance(part, Part):
                if name == "narrow":
                    return part._narrowed(*args[1:], **named)
                if name == "__getitem__" and (slices := _slices(args[1], part.shape)) is not None:
                    for dim, (start, length) in enumerate(slices):
                        part = part._narrowed(dim, start, length)
                    return part
                if name == "detach" or func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
                    return part
            if name == "__get__" and getattr(func.__self__, "__name__", "") in _VIEWS:
                name = func.__self__.__name__
            if name in _FACTS or name == "__get__":
                return func(*args, **named)
        raise NotInParts(name)

    def _narrowed(self, dim: int, start: int, length: int) -> Part:
        shape = list(self.shape)
        shape[dim] = length
        if dim:
            return Part.of(self.held.narrow(dim, start, length), self.first, shape)
        low, high = max(start, self.first), min(start + length, self.first + len(self.held))
        if high <= low:
            return Part.of(self.held[:0], 0, shape)
        return Part.of(self.held[low - self.first : high - self.first], low - start, shape)


class Joiner:
    """Puts parts together, in memory of their own."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[torch.Tensor, int]] = {}

    def add(self, name: str, part: Part) -> torch.Tensor | None:
        """Copy a part to its place. Returns the tensor once it is whole."""
        whole, rows = self._waiting.pop(name, (None, 0))
        if whole is None:
            whole = torch.empty(tuple(part.shape), dtype=part.held.dtype, device=part.held.device)
        whole.copy_(part)
        if (rows := rows + len(part.held)) == len(whole):
            return whole
        self._waiting[name] = whole, rows
        return None


def joined(pieces: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and whole tensors; those that come in parts in memory of their own."""
    joiner = Joiner()
    for piece in pieces:
        for name, tensor in piece.items():
            whole = joiner.add(name, tensor) if isinstance(tensor, Part) else tensor
            if whole is not None:
                yield name, whole


def _slices(index: Any, shape: torch.Size) -> list[tuple[int, int]] | None:
    """Return start and length by dimension; None for an index of another kind."""
    given = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(one, slice) and one.step in (None, 1) for one in given) or len(given) > len(shape):
        return None
    ranges = [one.indices(size) for one, size in zip(given, shape, strict=False)]
    return [(start, max(0, end - start)) for start, end, _ in ranges]
