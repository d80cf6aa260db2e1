"""Where the bytes of an NCCL transport lie and on which stream they move: a GPU's, or a stand-in's in the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weight_sync.transports.gpu.nccl_library import Library, Nccl, NcclError


class Stream(Protocol):
    """pointer: cudaStream_t."""

    pointer: int

    def current(self) -> AbstractContextManager[Any]:
        """Inside, torch's work of this thread goes onto the stream."""

    def mark(self) -> Callable[[], bool]:
        """Asks whether all is done that is on the stream by now."""


class CudaStream:
    """A stream apart from the one that trains or generates."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream
        self._stream = make(device)
        self.pointer = int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[Any]:
        # Also makes the device this thread's own: a new thread has device 0.
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def mark(self) -> Callable[[], bool]:
        make: Any = torch.cuda.Event
        event = make()
        event.record(self._stream)
        query: Callable[[], bool] = event.query
        return query


@dataclass(frozen=True)
class Gpu:
    """One end of a transport: the GPU that its bytes pass through. uuid: the physical one's, as torch tells it."""

    library: Library
    device: torch.device
    uuid: str
    stream: Callable[[], Stream]


def own_gpu(device: torch.device | None = None) -> Gpu:
    """`device`, or the one that this rank of the learner trains on. Raises `NcclError` where there is none."""
    if not torch.cuda.is_available():
        raise NcclError(
            "weight_sync.transport needs a GPU at the learner, and torch sees none; set weight_sync.transport = gloo "
            "for both ends"
        )
    device = device or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Gpu(Nccl(), device, uuid, lambda: CudaStream(device))
