"""A NCCL group of one learner (rank 0) and one server's workers, in which every wait has a deadline.

NCCL sets none, and a collective whose peer has died never returns (trl#6796). So each call is started and then asked
about until it is done, has failed, is aborted or takes too long; in the last three cases the group is aborted. Bytes
move on their own stream, on a GPU or on a stand-in's in the tests.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slipstream.weight_sync.transports.gpu.nccl_library import MAX_BLOCKS, Library, Nccl, NcclError, Result

# Seconds between two looks at a running call: the first value grows to the second.
FIRST_LOOK_S, LAST_LOOK_S = 20e-6, 1e-3

# How long `abort` waits for the thread that is in a call before it aborts the group nevertheless.
ABORT_WAIT_S = 1.0


class Stream(Protocol):
    """A stream of work on a device. `pointer` is its cudaStream_t."""

    pointer: int

    def current(self) -> AbstractContextManager[Any]:
        """Put torch's work of this thread onto the stream, inside the context."""

    def mark(self) -> Callable[[], bool]:
        """Return a function that tells whether all work that is on the stream by now is done."""


class CudaStream:
    """A stream apart from the one that trains or generates."""

    def __init__(self, device: torch.device) -> None:
        """Make a stream on a GPU; `device` without an index, as accelerate names the only one, is the current one."""
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        make: Any = torch.cuda.Stream
        self._stream = make(self._device)
        self.pointer = int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[Any]:
        # A new thread has device 0, and going back to that at the context's end would make a CUDA context there.
        torch.cuda.set_device(self._device)
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
    """The GPU that the bytes of one end pass through. `uuid` is the physical GPU's, as torch gives it."""

    library: Library
    device: torch.device
    uuid: str
    stream: Callable[[], Stream]


def own_gpu(device: torch.device | None = None) -> Gpu:
    """Describe `device`, or the one that this rank of the learner trains on. Raises `NcclError` without a GPU."""
    if not torch.cuda.is_available():
        raise NcclError(
            "weight_sync.transport needs a GPU at the learner, and torch sees none; set weight_sync.transport = gloo "
            "for both ends"
        )
    device = device or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Gpu(Nccl(), device, uuid, lambda: CudaStream(device))


class Communicator:
    """One rank of a group, used by one thread at a time. `abort` may be called from any thread, and again."""

    def __init__(self, gpu: Gpu, timeout_s: float, max_blocks: int | None = MAX_BLOCKS) -> None:
        """Make a rank without a group.

        Args:
            timeout_s: Bound on each call, in seconds.
            max_blocks: Blocks that a broadcast may use on the GPU. None: NCCL's own choice, as the server's make it.
        """
        self.stream = gpu.stream()
        self._gpu = gpu
        self._timeout_s = timeout_s
        self._max_blocks = max_blocks
        self._group: object | None = None
        self._ended = threading.Event()
        self._in_call = threading.Lock()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def meet(self, unique_id: bytes, size: int, rank: int) -> None:
        """Join the group of `unique_id` and sum one float32 over it, with which the server's workers begin.

        Raises:
            NcclError: Not all `size` ranks came in time.
        """

        def join() -> None:
            self._group = self._gpu.library.begin(unique_id, size, rank, self._max_blocks)

        with self.stream.current():
            self._bounded(join, f"not all {size} ranks came together")
            one = torch.zeros(1, dtype=torch.float32, device=self._gpu.device)
            self._bounded(
                lambda: self._gpu.library.sum_one(self._group, one.data_ptr(), self.stream.pointer),
                "the first collective",
            )
            self.wait("the first collective")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Start to copy rank 0's `tensor` into all others': uint8 [n], contiguous, on the group's GPU. See `wait`."""
        address, count = tensor.data_ptr(), len(tensor)
        self._bounded(
            lambda: self._gpu.library.broadcast(self._group, address, count, self.stream.pointer), "a broadcast"
        )

    def wait(self, what: str = "a broadcast", done: Callable[[], bool] | None = None) -> None:
        """Wait for work on the stream. `what` names it in an error.

        Args:
            done: An earlier `Stream.mark`; None: all work that is on the stream by now.
        """
        self._bounded(None, what, done or self.stream.mark())

    def stop(self) -> None:
        """Make the running call raise `NcclError`. Returns at once; `abort` must still be called."""
        self._ended.set()

    def abort(self) -> None:
        """End the group. The running call raises `NcclError`, and so does every later one."""
        self._ended.set()
        if self._in_call.acquire(timeout=ABORT_WAIT_S):
            try:
                self._let_go()
            finally:
                self._in_call.release()
        else:  # a thread is held inside NCCL, which this ends
            self._let_go()

    def _bounded(self, begin: Callable[[], None] | None, what: str, also: Callable[[], bool] = lambda: True) -> None:
        with self._in_call:
            try:
                ends = time.monotonic() + self._timeout_s
                self._check(what)
                if begin is not None:
                    begin()
                look = FIRST_LOOK_S
                while not self._done(what, also):
                    if time.monotonic() > ends:
                        raise NcclError(f"{what}: not done within {self._timeout_s:g} s")
                    time.sleep(look)
                    look = min(2 * look, LAST_LOOK_S)
            except BaseException:
                self._ended.set()
                self._let_go()
                raise

    def _done(self, what: str, also: Callable[[], bool]) -> bool:
        self._check(what)  # first: an aborted group must not be asked about
        return self._gpu.library.result(self._group) is Result.SUCCESS and also()

    def _check(self, what: str) -> None:
        if self._ended.is_set():
            raise NcclError(f"{what}: the group was aborted")

    def _let_go(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            # On its own thread: it may wait for kernels that wait for a peer.
            aborting = threading.Thread(target=self._abort, args=(group,), name="nccl-abort", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                aborting.start()
                aborting.join(ABORT_WAIT_S)

    def _abort(self, group: object) -> None:
        with self.stream.current():  # NCCL goes back to the thread's device when it is done
            self._gpu.library.abort(group)
