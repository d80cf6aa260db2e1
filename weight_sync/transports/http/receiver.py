"""A worker's end of the http transport. One worker of a host pulls into a buffer that the others map.

A pull that broke off leaves its buffer to the next connection of the same learner, which goes on with it: a line that
is too slow for `weight_sync.timeout_s` brings a version in several tries.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http.chunks import ChunkList, bytes_of, digest_of
from slipstream.weight_sync.transports.http.pull import Pull
from slipstream.weight_sync.transports.http.staging import BrokeOff, Record, SharedStaging
from slipstream.weight_sync.transports.receiver import HostShares, Share, Worker
from slipstream.weight_sync.weights.delta_codec import DeltaError, apply
from slipstream.weight_sync.weights.manifest import Manifest

logger = logging.getLogger(__name__)

GREETING = ChunkList.of(torch.ones(1, dtype=torch.uint8))


@dataclass(frozen=True)
class HttpInitInfo:
    """Body of `/init_weight_transfer_engine`.

    Attributes:
        key: Name of the transfer on the server's host, 16 hex digits.
        secret: To be brought to the learner and to other servers.
        greeting: URL of one byte, to find out whether the learner can be reached.
        timeout_s: Bound on one snapshot, in seconds.
        mbytes_per_s: Bound on what this server passes on, in 10**6 bytes per second; 0 for none.
        bucket_bytes: Bytes that are copied to a GPU at one time.
    """

    key: str
    secret: str
    greeting: str
    timeout_s: float
    mbytes_per_s: float
    bucket_bytes: int


@dataclass(frozen=True)
class DeltaInfo:
    """The deltas from one snapshot to the new one.

    Attributes:
        base: Digest of the snapshot to apply them to (`ChunkList.root`).
        url: Where the payloads are, one behind the other, in the order to apply them.
        chunks: Fields of their `ChunkList`.
        sizes: Bytes of each payload.
    """

    base: str
    url: str
    chunks: dict[str, Any]
    sizes: list[int]


@dataclass(frozen=True)
class HttpUpdateInfo:
    """Body of `/update_weights`.

    Attributes:
        manifest: Fields of the `Manifest`.
        chunks: Fields of the `ChunkList`.
        sources: URLs of the bytes, in the order to ask; the last is the learner's.
        delta: Fields of a `DeltaInfo`, None to pull the whole.
    """

    manifest: dict[str, Any]
    chunks: dict[str, Any]
    sources: list[str]
    delta: dict[str, Any] | None = None


class _Unfinished:
    """The buffers of receivers that were closed before all had arrived, until the same transfer's next one takes them.
    Call it from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[tuple[str, int], SharedStaging] = {}

    def leave(self, key: str, rank: int, staging: SharedStaging) -> None:
        with self._lock:
            self._left[key, rank] = staging

    def take(self, key: str, rank: int) -> SharedStaging | None:
        with self._lock:
            return self._left.pop((key, rank), None)

    def clear(self) -> None:
        """Release what is left: it is another learner's."""
        with self._lock:
            left, self._left = self._left, {}
        for staging in left.values():
            staging.close()


_UNFINISHED = _Unfinished()


class HttpReceiver:
    """See `Receiver`. One worker of a host pulls, and the others map its buffer."""

    def __init__(self, info: dict[str, Any], worker: Worker) -> None:
        """Pull one byte from the learner. Raises `TransferError` if it cannot be reached."""
        self._init = init = HttpInitInfo(**info)
        self._rank = worker.rank
        self._shares = HostShares(worker.device, init.bucket_bytes)
        self._pull: Pull | None = None
        self._closed = False
        Pull(GREETING, init.secret, [init.greeting], memoryview(bytearray(1)), init.timeout_s).run()
        left = _UNFINISHED.take(init.key, worker.rank)
        self._whole = left is None
        self._staging = left or SharedStaging(init.key, worker.device)

    def receive(self, update: dict[str, Any]) -> Share:
        """Receive a snapshot into memory that the next one is received into.

        Raises:
            TransferError: It did not arrive whole.
            ValueError: `update` contradicts itself.
        """
        info = HttpUpdateInfo(**update)
        manifest, chunks = Manifest(**info.manifest), ChunkList(**info.chunks)
        if chunks.total_bytes != manifest.total_bytes():
            raise ValueError(
                f"the chunks have {chunks.total_bytes} bytes, and the manifest has {manifest.total_bytes()}"
            )
        # All receivers of this connection have been made by now.
        _UNFINISHED.clear()
        self._whole = False
        filling = _Filling(self, info, manifest, chunks, time.monotonic() + self._init.timeout_s)
        secret_hash = digest_of(memoryview(self._init.secret.encode()))
        wanted = Record(
            *(0, 0, chunks.total_bytes, chunks.root, chunks.chunk_bytes, chunks.digests),
            secret_hash=secret_hash,
            mbytes_per_s=self._init.mbytes_per_s,
        )
        flat = self._staging.receive(wanted, filling, self._init.timeout_s)
        self._whole = True
        return self._shares.share(manifest, flat)

    def close(self) -> None:
        """End the running pull, and release the buffer unless a pull into it broke off. Never raises."""
        if self._closed:
            return
        self._closed = True
        if self._pull is not None:
            self._pull.stop("the learner was let go")
        if self._whole:
            self._staging.close()
        else:
            _UNFINISHED.leave(self._init.key, self._rank, self._staging)

    def pull(
        self,
        chunks: ChunkList,
        urls: list[str],
        into: torch.Tensor,
        deadline: float,
        held: set[int] | None = None,
        begun: dict[int, int] | None = None,
    ) -> None:
        """Block until `into` holds the blob of `chunks`. `held`, `begun`: see `Pull`.

        Raises:
            TransferError: It did not arrive; `BrokeOff` where another pull into the same memory can go on.
        """
        if self._closed:
            raise TransferError("the learner was let go")
        timeout_s = max(0.1, deadline - time.monotonic())
        self._pull = pull = Pull(chunks, self._init.secret, urls, bytes_of(into), timeout_s, held, begun)
        try:
            pull.run()
        except TransferError as error:
            if pull.abandoned or not pull.begun:
                raise
            raise BrokeOff(str(error), pull.begun) from error
        finally:
            if pull.abandoned:
                self._staging.forget_buffer()


@dataclass(frozen=True)
class _Filling:
    """Updates the shared buffer to the wanted blob: a `Fill`."""

    receiver: HttpReceiver
    info: HttpUpdateInfo
    manifest: Manifest
    chunks: ChunkList
    deadline: float

    def __call__(self, into: torch.Tensor, before: Record | None) -> None:
        held = self._held(into, before) if before is not None else set()
        begun = dict(before.begun) if before is not None and before.part_of == self.chunks.root else {}
        try:
            self.receiver.pull(self.chunks, self.info.sources, into, self.deadline, held, begun)
        except BrokeOff as error:
            raise BrokeOff(f"{error}; another try of this version goes on from there", error.begun) from error

    def _held(self, into: torch.Tensor, before: Record) -> set[int]:
        """Return the indices of the chunks that need not be pulled, after applying the delta if there is one."""
        if before.holds and self.info.delta is not None:
            delta = DeltaInfo(**self.info.delta)
            if delta.base == before.holds:
                self._lay_on(delta, into)
                return self._right(into)
            logger.warning("a delta was sent to weights that are not here: everything is pulled")
        if before.holds and before.chunk_bytes == self.chunks.chunk_bytes:
            pairs = enumerate(zip(before.digests, self.chunks.digests, strict=True))
            return {index for index, (old, new) in pairs if old == new}
        return self._right(into)  # a pull broke off here

    def _lay_on(self, delta: DeltaInfo, into: torch.Tensor) -> None:
        """Apply the deltas to `into`. If that fails, the digests of the result tell what to pull."""
        chunks = ChunkList(**delta.chunks)
        payload = torch.empty(chunks.total_bytes, dtype=torch.uint8)
        try:
            self.receiver.pull(chunks, [delta.url], payload, self.deadline)
            for part in torch.split(payload, delta.sizes):
                apply(part, into, self.manifest)
        except (DeltaError, TransferError, RuntimeError) as error:  # RuntimeError: sizes that do not fit
            logger.warning("the delta could not be used: %s", error)

    def _right(self, into: torch.Tensor) -> set[int]:
        damaged = self.chunks.damaged(into)
        if damaged and self.info.delta is not None:
            logger.warning("%d chunks are not right after the delta, and are pulled", len(damaged))
        return set(range(len(self.chunks.digests))) - set(damaged)
