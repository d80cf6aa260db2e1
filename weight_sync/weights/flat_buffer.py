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

# Bound on a wait for pages, above what those of a model that fills a machine take.
MAX_WAIT_S = 30.0
ALIGNMENT = 64

# torch.compile, FSDP, activation checkpointing, and peft around a layer: anywhere in a name.
_AROUND = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}

# DDP and peft around a model: at its beginning.
_BEFORE = (["module"], ["base_model", "model"])


def fresh(size: int) -> torch.Tensor:
    """Make a uint8 [size] of zeros, in huge pages if the system has them. Pages are taken as they are touched."""
    if size < HUGE:
        return torch.zeros(size, dtype=torch.uint8)
    whole = _advised(mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size]


def touch(flat: torch.Tensor) -> None:
    """Take all pages of a buffer whose content does not matter, so that filling it does not wait for them."""
    flat[::PAGE].fill_(0)


class Staging:
    """A buffer that is made at first use, and again only for another size."""

    def __init__(self, shared: bool = False) -> None:
        """Make a buffer without memory.

        Args:
            shared: Whether other processes of this user on this host can map it by its `place`. Nothing of it stays in
                the file system, even if the process is killed.
        """
        self._shared = shared
        self._flat: torch.Tensor | None = None
        self._fd: int | None = None

    def take(self, size: int) -> torch.Tensor:
        """Return a uint8 [size] with any content; the same memory for the same size."""
        if self._flat is None or len(self._flat) != size:
            self.forget()
            self._flat = self._made(size)
        return self._flat

    @property
    def place(self) -> tuple[int, int]:
        """Returns process id and file descriptor of a shared buffer, for `mapped`."""
        if self._fd is None:
            raise ValueError("the buffer is not shared, or not taken yet")
        return os.getpid(), self._fd

    def forget(self) -> None:
        """Never uses the present memory again: something may still read or write it. Views of it stay good."""
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
    """Map the shared buffer of another process as uint8 [size].

    Args:
        pid: Its process id, the first value of `Staging.place`.
        fd: Its file descriptor, the second value.

    Raises:
        OSError: The buffer is gone, or has another size.
    """
    ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(ours).st_size != max(1, size):
            raise OSError(f"the buffer of process {pid} has another size than {size} bytes")
        return _advised(mmap.mmap(ours, max(1, size)))[:size]
    finally:
        os.close(ours)


class Reserve:
    """Prepares buffers on a thread, so that filling them does not wait for their pages."""

    def __init__(self, most: int) -> None:
        """Make a reserve without buffers.

        Args:
            most: Number of buffers to prepare in all for one size. `take` makes any more itself.
        """
        self._most = most
        self._changed = threading.Condition()
        self._size: int | None = None
        self._made = 0
        self._making = False
        self._ready: list[torch.Tensor] = []

    def expect(self, size: int) -> None:
        """Start to prepare a buffer of `size` bytes, unless one is ready or being prepared. Returns at once."""
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
        """Return a uint8 [size] like `fresh`. Waits for one that is being prepared, which is faster than a new one."""
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
    """Return `memory` as a uint8 tensor, which keeps it alive, and asks for huge pages."""
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


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
        return asdict(self)

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

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Yield index, first byte and byte past the end of each tensor."""
        start = 0
        for i, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True)):
            end = start + _dtype(dtype).itemsize * math.prod(shape)
            yield i, start, end
            start = -(-end // ALIGNMENT) * ALIGNMENT


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
