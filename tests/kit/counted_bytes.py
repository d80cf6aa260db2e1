"""Counts the bytes that a process's tensors take and that are copied, in place of a device's own counters.

It sees every operation of torch, on whatever device, so that a CPU shows what a GPU would be asked for.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ByteCounter:
    """The counts. Tensors that were there before, and memory that is mapped or shared, do not count.

    Attributes:
        live: Bytes of tensors that were made since the beginning and still exist.
        peak: Largest value of `live` so far.
        made: Bytes of all tensors made, by their device.
        copied: Bytes copied, by "from -> to"; the host's memory is "cpu" or, if pinned, "pinned".
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.made: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self._known: set[int] = set()
        self._lock = threading.RLock()  # a tensor may be let go within `note`

    def counts(self) -> dict[str, Any]:
        """Returns the attributes as plain data."""
        return {"live": self.live, "peak": self.peak, "made": dict(self.made), "copied": dict(self.copied)}

    def note(self, function: Any, given: tuple[Any, ...], result: Any) -> None:
        """Count an operation that has been done."""
        name = function.overloadpacket.__name__
        seen = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                self._made(storage)
        if name == "copy_":
            self._copied(given[1], given[0])
        elif name in ("_to_copy", "clone") and isinstance(result, torch.Tensor):
            self._copied(given[0], result)

    def _made(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        with self._lock:
            if storage._cdata in self._known:
                return
            self._known.add(storage._cdata)
            self.live += size
            self.peak = max(self.peak, self.live)
            self.made[str(storage.device)] += size
        weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, key: int, size: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.live -= size

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._lock:
            self.copied[f"{_memory(source)} -> {_memory(target)}"] += target.nbytes


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counter: ByteCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._counter.note(func, args, result)
        return result


@contextmanager
def counting_bytes() -> Iterator[ByteCounter]:
    """Count the operations of this thread, and of all threads that begin inside the context."""
    counter = ByteCounter()
    thread: Any = threading.Thread
    begin = thread._bootstrap_inner

    def counted(self: threading.Thread) -> None:
        with _Counting(counter):
            begin(self)

    thread._bootstrap_inner = counted
    try:
        with _Counting(counter):
            yield counter
    finally:
        thread._bootstrap_inner = begin


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn)


def _memory(tensor: torch.Tensor) -> str:
    return "pinned" if tensor.device.type == "cpu" and tensor.is_pinned() else str(tensor.device)
