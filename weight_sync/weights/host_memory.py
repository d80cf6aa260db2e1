"""Host memory for whole models.

A fresh page costs more than copying into it, as the kernel clears it first, 4 KiB at a time. Huge pages avoid most of
that cost, a buffer that is used again the rest. Memory that a GPU copies from or to is pinned: else the driver copies
everything once more, and holds the caller up.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading

import torch

logger = logging.getLogger(__name__)

# A smaller buffer fits no huge page.
HUGE = 2 * 2**20
PAGE = 4096

# Bound on a wait for pages, above what those of a model that fills a machine take.
MAX_WAIT_S = 30.0


def fresh(size: int, device: torch.device | None = None) -> torch.Tensor:
    """Make a uint8 [size] of zeros, in huge pages if the system has them. Pages are taken as they are touched.

    Args:
        device: A GPU that copies from or to it: then it is pinned, and all its pages are taken at once.
    """
    on_gpu = device is not None and device.type == "cuda"
    if size < HUGE and not on_gpu:
        return torch.zeros(size, dtype=torch.uint8)
    whole = Memory(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = _advised(whole)
    start = -flat.data_ptr() % HUGE
    if device is not None and on_gpu:
        whole.pin(flat.data_ptr(), device)
    return flat[start : start + size]


class Memory(mmap.mmap):
    """Mapped memory, which lives as long as a tensor over it, and is pinned on request."""

    _pinned: tuple[int, torch.device] | None = None

    def pin(self, address: int, device: torch.device) -> None:
        """Pin all of it for copies from and to `device`. Where that fails, copies are slower: a line in the log says
        so."""
        with torch.cuda.device(device):  # else a thread's first call would open GPU 0
            error = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))  # type: ignore[no-untyped-call]
        if error:
            logger.warning(
                "%d bytes could not be pinned (CUDA error %d): copies to the GPU are slower", len(self), error
            )
        else:
            self._pinned = address, device

    def __del__(self) -> None:
        if self._pinned is not None:
            address, device = self._pinned
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def touch(flat: torch.Tensor) -> None:
    """Take all pages of a buffer whose content does not matter, so that filling it does not wait for them."""
    flat[::PAGE].fill_(0)


class Staging:
    """A buffer that is made at first use, and again only for another size."""

    def __init__(self, shared: bool = False, device: torch.device | None = None) -> None:
        """Make a buffer without memory.

        Args:
            shared: Whether other processes of this user on this host can map it by its `place`. Nothing of it stays in
                the file system, even if the process is killed.
            device: As in `fresh`.
        """
        self._shared = shared
        self._device = device
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
            return fresh(size, self._device)
        self._fd = os.memfd_create("slipstream-staging", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(1, size))
        return map_file(self._fd, size, self._device)


def map_file(fd: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """Map an open file of at least `size` bytes as uint8 [size]. `device`: as in `fresh`."""
    memory = Memory(fd, max(1, size))
    flat = _advised(memory)
    if device is not None and device.type == "cuda":
        memory.pin(flat.data_ptr(), device)
    return flat[:size]


def mapped(pid: int, fd: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """Map the shared buffer of another process as uint8 [size].

    Args:
        pid: Its process id, the first value of `Staging.place`.
        fd: Its file descriptor, the second value.
        device: As in `fresh`.

    Raises:
        OSError: The buffer is gone, or has another size.
    """
    ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(ours).st_size != max(1, size):
            raise OSError(f"the buffer of process {pid} has another size than {size} bytes")
        return map_file(ours, size, device)
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
        self._kind: tuple[int, torch.device | None] | None = None
        self._made = 0
        self._making = False
        self._ready: list[torch.Tensor] = []

    def expect(self, size: int, device: torch.device | None = None) -> None:
        """Start to prepare a buffer of `size` bytes, unless one is ready or being prepared. Returns at once.

        Args:
            device: As in `fresh`.
        """
        with self._changed:
            if (size, device) != self._kind:
                self._kind, self._made = (size, device), 0
                self._ready.clear()
            if self._making or self._ready or self._made == self._most:
                return
            self._making = True
            self._made += 1
        threading.Thread(target=self._make, args=(size, device), name="snapshot-pages", daemon=True).start()

    def take(self, size: int, device: torch.device | None = None) -> torch.Tensor:
        """Return a uint8 [size] like `fresh`. Waits for one that is being prepared, which is faster than a new one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._making, MAX_WAIT_S)
            if self._ready and (size, device) == self._kind:
                return self._ready.pop()
        return fresh(size, device)

    def _make(self, size: int, device: torch.device | None) -> None:
        flat: torch.Tensor | None = None
        try:
            flat = fresh(size, device)
            touch(flat)
        finally:
            with self._changed:
                self._making = False
                if flat is not None and (size, device) == self._kind:
                    self._ready.append(flat)
                self._changed.notify_all()


def _advised(memory: mmap.mmap) -> torch.Tensor:
    """Return `memory` as a uint8 tensor, which keeps it alive, and asks for huge pages."""
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
