"""Counts the memory of tensors from the operations that make them.

The count is the same at each run, no matter what else the machine does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the tensors that operations make inside this context, forward and backward.

    Memory that an operation uses internally does not count.

    Attributes:
        now: Bytes of these tensors at present.
        peak: Maximum of `now` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if id(storage) not in self._known and id(storage) not in given:
                self._known.add(id(storage))
                size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, id(storage), size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_iter(values) if isinstance(value, torch.Tensor)]
