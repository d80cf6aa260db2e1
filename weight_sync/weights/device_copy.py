"""Copies weights from a GPU to the host during the work of its other streams."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

# Bytes that are copied to the host at one time.
BUCKET_BYTES = 64 * 2**20


class DeviceCopies(Protocol):
    """The copies of one snapshot, bucket by bucket. `wait` may be called from any thread, and again."""

    def empty(self, size: int) -> torch.Tensor:
        """Make a uint8 [size] on the device, to be filled by the caller's stream."""

    def to_host(self, on_device: torch.Tensor, host: torch.Tensor) -> None:
        """Copy what the caller's stream has put into `on_device`, as soon as it is there. Returns at once.

        Args:
            on_device: Made by `empty`; let go when it was copied.
            host: uint8 of the same size, pinned.
        """

    def end(self) -> None:
        """Say that no more follow."""

    def wait(self) -> None:
        """Wait until all copies are done."""


# One for all snapshots: torch has 32 for each device, and gives the next ones out again while NCCL or FSDP use them.
_streams: dict[torch.device, Any] = {}


class CudaCopies:
    """See `DeviceCopies`."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream
        self._device = device
        if device not in _streams:
            _streams[device] = make(device)
        self._stream = _streams[device]
        self._under_way: list[tuple[torch.Tensor, Any]] = []
        self._lock = threading.Lock()

    def empty(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            if not self._under_way:
                raise
            self.wait()
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def to_host(self, on_device: torch.Tensor, host: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(on_device, non_blocking=True)
            done = self._stream.record_event()
        with self._lock:
            self._under_way.append((on_device, done))

    def end(self) -> None:
        # The device's memory is wanted by the next step, whoever needs the snapshot when.
        threading.Thread(target=self.wait, name="snapshot-copies", daemon=True).start()

    def wait(self) -> None:
        torch.cuda.set_device(self._device)  # a new thread has GPU 0, and would open it
        while True:
            with self._lock:
                if not self._under_way:
                    return
                _, done = self._under_way[0]
            done.synchronize()
            with self._lock:
                if self._under_way and self._under_way[0][1] is done:
                    self._under_way.pop(0)


def copies_from(device: torch.device) -> DeviceCopies | None:
    """Prepare copies from `device`; None where its tensors are on the host already."""
    return CudaCopies(device) if device.type == "cuda" else None
