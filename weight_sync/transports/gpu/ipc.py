"""The ipc transport: two buckets on the learner's GPU, which the one worker of a server on the same GPU opens.

While the worker loads from one bucket, the learner fills the other. Each end counts in the same memory what it has
filled or loaded. Plain values name the memory, so nothing is pickled (I8). A checksum behind each bucket verifies it.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slipstream.protocol.config import WeightSyncSection
from slipstream.weight_sync.server.cancellation import on_thread
from slipstream.weight_sync.transports.base import Sender, TransferError
from slipstream.weight_sync.transports.gpu import communicator
from slipstream.weight_sync.transports.gpu.communicator import FIRST_LOOK_S, LAST_LOOK_S, Gpu, Stream
from slipstream.weight_sync.transports.receiver import Share, Weights, Worker
from slipstream.weight_sync.weights.checksum import SIZE, checksum
from slipstream.weight_sync.weights.manifest import ALIGNMENT, Manifest
from slipstream.weight_sync.weights.snapshot import Snapshot

# Places of the counters of buckets that were filled and loaded.
FILLED, LOADED = 0, 1


@dataclass(frozen=True)
class Handle:
    """Names a tensor's memory on a GPU so that another process can open it, as torch's storage exports it.

    Attributes:
        gpu: UUID of the GPU. Bytes in the other fields are base64, sizes are in bytes.
    """

    gpu: str
    memory: str
    size: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    event_wait: bool


def export_storage(tensor: torch.Tensor, gpu: str) -> Handle:
    """Export the whole storage of `tensor`, once: torch counts one opener for each export. Raises RuntimeError."""
    storage: Any = tensor.untyped_storage()
    _, memory, size, offset, counter, counter_offset, event, event_wait = storage._share_cuda_()
    return Handle(gpu, _text(memory), size, offset, _text(counter), counter_offset, _text(event), bool(event_wait))


def open_storage(handle: Handle, device: torch.device) -> torch.Tensor:
    """Open another process's memory as uint8 [handle.size], for as long as the tensor lives. Raises RuntimeError."""
    torch.cuda.current_device()  # starts CUDA: torch does not do it here, and a process without it would crash
    make: Any = torch.UntypedStorage
    storage = make._new_shared_cuda(
        device.index or 0,
        _bytes(handle.memory),
        handle.size,
        handle.offset,
        _bytes(handle.counter),
        handle.counter_offset,
        _bytes(handle.event),
        handle.event_wait,
    )
    memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return memory


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class SharedBuckets:
    """Memory of a GPU that learner and worker share: two places for a bucket and its checksum, and two counters."""

    def __init__(self, memory: torch.Tensor, stream: Stream, timeout_s: float) -> None:
        """Take memory over.

        Args:
            memory: uint8 [`size_for` a bucket].
            timeout_s: Bound on each wait for the other end, in seconds.
        """
        self.stopped = threading.Event()
        self.stream = stream
        self._timeout_s = timeout_s
        self._place_bytes = (len(memory) - ALIGNMENT) // 2
        self._places = memory[: 2 * self._place_bytes].split(self._place_bytes)  # type: ignore[no-untyped-call]
        self._counters = memory[2 * self._place_bytes :][:SIZE].view(torch.int64)

    @staticmethod
    def size_for(bucket_bytes: int) -> int:
        """Return the bytes of memory for buckets of at most `bucket_bytes`."""
        return 2 * -(-(bucket_bytes + SIZE) // ALIGNMENT) * ALIGNMENT + ALIGNMENT

    def place(self, number: int) -> torch.Tensor:
        """Return the place of bucket `number`."""
        place: torch.Tensor = self._places[number % 2]
        return place

    def reset(self) -> None:
        """Count from 0 again."""
        with self.stream.current():
            self._counters.zero_()
            self._wait(self.stream.mark(), "the counters")

    def tell(self, counter: int, count: int) -> None:
        """Set one of the counters, once all work on the stream is done."""
        with self.stream.current():
            self._wait(self.stream.mark(), "a copy")
            self._counters[counter] = count
            self._wait(self.stream.mark(), "a counter")

    def await_count(self, counter: int, count: int, who: str) -> None:
        """Wait until the other end has set a counter to `count` or more. `who` names it in an error."""

        def there() -> bool:
            with self.stream.current():
                return int(self._counters[counter]) >= count

        self._wait(there, who)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        ends, look = time.monotonic() + self._timeout_s, FIRST_LOOK_S
        while not done():
            if self.stopped.is_set():
                raise TransferError(f"{what}: the transfer was ended")
            if time.monotonic() > ends:
                raise TransferError(f"{what}: not done within {self._timeout_s:g} s")
            time.sleep(look)
            look = min(2 * look, LAST_LOOK_S)


class IpcSender(Sender):
    """The learner's end. See `Sender`."""

    def __init__(self, section: WeightSyncSection) -> None:
        self._section = section
        self._gpu: Gpu | None = None
        self._stream: Stream | None = None
        self._memory: torch.Tensor | None = None
        self._handle: Handle | None = None
        self._shared: SharedBuckets | None = None

    async def open(self, server_url: str, workers: int) -> dict[str, Any]:
        if workers != 1:
            raise TransferError(
                f"{server_url} has {workers} workers, each on its own GPU, and ipc is for one GPU that learner "
                f"and server are on; set weight_sync.transport = nccl_staged for both ends"
            )
        self._gpu = await on_thread(communicator.own_gpu)
        section = self._section
        return asdict(IpcInitInfo(self._gpu.uuid, section.bucket_bytes, section.timeout_s))

    async def offer(self, snapshot: Snapshot) -> dict[str, Any]:
        if self._gpu is None:
            raise TransferError("the transport is not connected")
        handle = await on_thread(self._share_memory, self._gpu, snapshot)
        return asdict(IpcUpdateInfo(snapshot.manifest.as_dict(), asdict(handle)))

    async def send(self, snapshot: Snapshot) -> None:
        shared = self._shared
        if shared is None:
            raise TransferError("the transport is not connected")
        await on_thread(self._fill, shared, snapshot, cancelled=shared.stopped.set)

    async def close(self) -> None:
        if self._shared is not None:
            self._shared.stopped.set()
        self._gpu = self._memory = self._handle = self._shared = None

    def _share_memory(self, gpu: Gpu, snapshot: Snapshot) -> Handle:
        buckets = snapshot.manifest.buckets(self._section.bucket_bytes)
        size = SharedBuckets.size_for(max((bucket.size for bucket in buckets), default=0))
        stream = self._stream = self._stream or gpu.stream()
        try:
            if self._memory is None or self._handle is None or len(self._memory) < size:
                with stream.current():
                    self._memory = torch.empty(size, dtype=torch.uint8, device=gpu.device)
                    self._handle = export_storage(self._memory, gpu.uuid)
            self._shared = SharedBuckets(self._memory, stream, self._section.timeout_s)
            self._shared.reset()
        except RuntimeError as error:
            raise TransferError(
                f"the learner's memory cannot be shared: {error}; where PYTORCH_CUDA_ALLOC_CONF has "
                f"expandable_segments, leave that out"
            ) from error
        return self._handle

    def _fill(self, shared: SharedBuckets, snapshot: Snapshot) -> None:
        flat, buckets = snapshot.flat, snapshot.manifest.buckets(self._section.bucket_bytes)
        for number, bucket in enumerate(buckets):
            shared.await_count(LOADED, number - 1, "the server")
            place = shared.place(number)
            with shared.stream.current():
                place[: bucket.size].copy_(flat[bucket.start : bucket.end], non_blocking=True)
                place[bucket.size :][:SIZE] = checksum(place[: bucket.size])
            shared.tell(FILLED, number + 1)
        shared.await_count(LOADED, len(buckets), "the server")


@dataclass(frozen=True)
class IpcInitInfo:
    """Body of `/init_weight_transfer_engine`.

    Attributes:
        learner_gpu: UUID of the GPU that holds the weights.
        bucket_bytes: Bytes that are copied at one time.
        timeout_s: Bound on each wait, in seconds.
    """

    learner_gpu: str
    bucket_bytes: int
    timeout_s: float


@dataclass(frozen=True)
class IpcUpdateInfo:
    """Body of `/update_weights`: the fields of `Manifest` and `Handle`."""

    manifest: dict[str, Any]
    handle: dict[str, Any]


class IpcReceiver:
    """See `Receiver`. Keeps the learner's memory open from one update to the next."""

    def __init__(self, info: dict[str, Any], worker: Worker) -> None:
        """Prepare to receive. Raises `TransferError` if the learner is on another GPU."""
        self._info = wanted = IpcInitInfo(**info)
        self._gpu = gpu = communicator.own_gpu(worker.device)
        if gpu.uuid != wanted.learner_gpu:
            raise TransferError(
                f"the learner is on the GPU {wanted.learner_gpu} and this server on {gpu.uuid}, and ipc is for one "
                f"that both are on; set weight_sync.transport = nccl_staged for both ends"
            )
        self._stream = gpu.stream()
        self._opened: tuple[Handle, torch.Tensor] | None = None
        self._shared: SharedBuckets | None = None

    def receive(self, update: dict[str, Any]) -> Share:
        """Open the learner's memory. Its buckets are loaded from where they lie.

        Raises:
            TransferError: A bucket is not what the learner put there, or the learner is gone or late.
        """
        info = IpcUpdateInfo(**update)
        handle, manifest = Handle(**info.handle), Manifest(**info.manifest)
        try:
            if self._opened is None or self._opened[0] != handle:
                self._opened = self._shared = None  # the old memory is let go first
                self._opened = handle, open_storage(handle, self._gpu.device)
        except RuntimeError as error:
            raise TransferError(f"the learner's memory cannot be opened: {error}") from error
        self._shared = SharedBuckets(self._opened[1][: handle.size], self._stream, self._info.timeout_s)
        return Share(manifest, self._pieces(manifest, self._shared))

    def close(self) -> None:
        """Close the learner's memory. A running reception raises. May be called again."""
        if self._shared is not None:
            self._shared.stopped.set()
        self._opened = self._shared = None

    def _pieces(self, manifest: Manifest, shared: SharedBuckets) -> Iterator[Weights]:
        for number, bucket in enumerate(manifest.buckets(self._info.bucket_bytes)):
            shared.await_count(FILLED, number + 1, "the learner")
            place = shared.place(number)
            with shared.stream.current():
                right = torch.equal(checksum(place[: bucket.size]), place[bucket.size :][:SIZE])
            if not right:
                raise TransferError(f"the checksum of bucket {number} is not the learner's")
            yield bucket.tensors(place[: bucket.size])
            shared.tell(LOADED, number + 1)
