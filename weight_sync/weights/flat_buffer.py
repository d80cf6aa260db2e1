"""Host memory for whole models: in huge pages, made once and used again.

A fresh page costs more than copying into it: the kernel clears it first, 4 KiB at a time. Huge pages take most of that
away, a buffer that is used again the rest.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

import torch

# A smaller buffer fits no huge page.
HUGE = 2 * 2**20

PAGE = 4096

# The pages of a model that fills a machine are taken in less.
LONGEST_WAIT_S = 30.0


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
            self._changed.wait_for(lambda: not self._making, LONGEST_WAIT_S)
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
