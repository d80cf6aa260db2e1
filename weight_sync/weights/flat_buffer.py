"""Host memory for whole models, and where each tensor lies in the one flat buffer that travels.

A fresh page costs more than copying into it, as the kernel clears it first, 4 KiB at a time. Huge pages avoid most of
that cost, a buffer that is used again the rest. Learner and server compute the same layout from one `Manifest`; its
names are a checkpoint's, whatever wraps the module that the tensors are taken from.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

# A smaller buffer fits no huge page.
HUGE = 2 * 2**20
PAGE = 4096

# The pages of a model that fills a machine are taken in less.
MAX_WAIT_S = 30.0
ALIGNMENT = 64

# torch.compile, FSDP, activation checkpointing, and peft around a layer: anywhere in a name.
_AROUND = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}

# DDP and peft around a model: at its beginning.
_BEFORE = (["module"], ["base_model", "model"])


def fresh(size: int) -> torch.Tensor:
    """uint8 [size] of zeros, in huge pages where the system gives them. Its pages are taken as they are touched."""
    if size < HUGE:
        return torch.zeros(size, dtype=torch.uint8)
    whole = _advised(mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size]


def touch(flat: torch.Tensor) -> None:
    """Take all pages of a buffer whose content does not matter now, so that who fills it does not wait for them."""
    flat[::PAGE].fill_(0)


class Staging:
    """A buffer that is made at first use, and again only for another size.

    shared: other processes of this user on this host can map it by its `place`; nothing of it is left behind in the
    file system, even by a process that is killed.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._flat: torch.Tensor | None = None
        self._fd: int | None = None

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size] with whatever was there; the same memory for the same size."""
        if self._flat is None or len(self._flat) != size:
            self.forget()
            self._flat = self._made(size)
        return self._flat

    @property
    def place(self) -> tuple[int, int]:
        """Process id and file descriptor of a shared buffer, for `mapped`."""
        if self._fd is None:
            raise ValueError("the buffer is not shared, or not taken yet")
        return os.getpid(), self._fd

    def forget(self) -> None:
        """Never use the present memory again: something may still read or write it. Views of it stay good."""
        self._flat = None
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.forget()

    def _made(self, size: int) -> torch.Tensor:
        if not self._shared:
            return fresh(size)
        self._fd = os.memfd_create("slipstream-staging", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(1, size))
        return _advised(mmap.mmap(self._fd, max(1, size)))[:size]


def mapped(pid: int, fd: int, size: int) -> torch.Tensor:
    """uint8 [size]: the buffer at `place` (pid, fd) of another process. Raises OSError where it is gone or no buffer
    of that size."""
    ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(ours).st_size != max(1, size):
            raise OSError(f"the buffer of process {pid} has another size than {size} bytes")
        return _advised(mmap.mmap(ours, max(1, size)))[:size]
    finally:
        os.close(ours)


class Reserve:
    """Buffers whose pages are taken on a thread, ahead of who fills them: for those snapshots that are alive at once.

    most: buffers that are made in all for one size; who wants more makes them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._size: int | None = None
        self._made = 0
        self._making = False
        self._ready: list[torch.Tensor] = []

    def expect(self, size: int) -> None:
        """Have a buffer of `size` bytes ready soon. Returns at once; does nothing where one is ready or on its way."""
        with self._changed:
            if size != self._size:
                self._size, self._made = size, 0
                self._ready.clear()
            if self._making or self._ready or self._made == self._most:
                return
            self._making = True
            self._made += 1
        threading.Thread(target=self._make, args=(size,), name="snapshot-pages", daemon=True).start()

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], as `fresh`. Waits for one that is on its way: it is there sooner than a new one is filled."""
        with self._changed:
            self._changed.wait_for(lambda: not self._making, MAX_WAIT_S)
            if self._ready and size == self._size:
                return self._ready.pop()
        return fresh(size)

    def _make(self, size: int) -> None:
        flat: torch.Tensor | None = None
        try:
            flat = fresh(size)
            touch(flat)
        finally:
            with self._changed:
                self._making = False
                if flat is not None and size == self._size:
                    self._ready.append(flat)
                self._changed.notify_all()


def _advised(memory: mmap.mmap) -> torch.Tensor:
    """uint8, all of `memory`, which lives as long as the tensor does."""
    with contextlib.suppress(OSError, AttributeError):  # a system that knows no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


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


def unwrapped(name: str) -> str:
    """`name` without what wrappers put into it."""
    parts = [part for part in name.split(".") if part not in _AROUND]
    while before := next((one for one in _BEFORE if parts[: len(one)] == one and len(parts) > len(one)), None):
        parts = parts[len(before) :]
    return ".".join(parts)


def check_distinct(names: Iterable[str]) -> None:
    """Raises ValueError where two of `names` are one without their wrappers."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(unwrapped(name), name)
        if other != name:
            raise ValueError(f"{other} and {name} are both {unwrapped(name)} in a checkpoint: publish one of them")
