"""A worker's end of the http transport. One worker of a host pulls into a buffer that the others map.

A pull that broke off leaves its buffer to the next connection of the same learner, which continues with it: a line that
is too slow for `weight_sync.timeout_s` brings a version in several tries.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.http.chunks import ChunkList, bytes_of, digest_of
from slipstream.weight_sync.transports.http.pull import Pull, PullReport
from slipstream.weight_sync.transports.http.staging import BrokeOff, Record, SharedStaging
from slipstream.weight_sync.transports.receiver import HostShares, Share, Worker
from slipstream.weight_sync.weights.delta_codec import DeltaError, apply
from slipstream.weight_sync.weights.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpInitInfo:
    """Body of `/init_weight_transfer_engine`.

    Attributes:
        key: Name of the transfer on the server's host, 16 hex digits.
        secret: To be brought to the learner and to other servers.
        timeout_s: Bound on one snapshot, in seconds.
        mbytes_per_s: Bound on what this server passes on, in 10**6 bytes per second; 0 for none.
        bucket_bytes: Bytes that are copied to a GPU at one time.
    """

    key: str
    secret: str
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


# The buffers of receivers that were closed before all had arrived, by transfer and worker. The same transfer's next
# receiver takes them.
_UNFINISHED: dict[tuple[str, int], SharedStaging] = {}


class HttpReceiver:
    """See `Receiver`. One worker of a host pulls, and the others map its buffer."""

    def __init__(self, info: dict[str, Any], worker: Worker) -> None:
        """Prepare to pull."""
        self._init = init = HttpInitInfo(**info)
        self._place = (init.key, worker.rank)
        self._shares = HostShares(worker.device, init.bucket_bytes)
        self._pull: Pull | None = None
        self._closed = False
        left = _UNFINISHED.pop(self._place, None)
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
        # All receivers of this connection have been made by now, so what is left is another learner's.
        for place in list(_UNFINISHED):
            if (left := _UNFINISHED.pop(place, None)) is not None:
                left.close()
        self._whole = False
        deadline = time.monotonic() + self._init.timeout_s

        def fill(into: torch.Tensor, before: Record | None) -> None:
            begun = self._begun(info, manifest, chunks, into, before, deadline) if before is not None else {}
            report = self._pulled(chunks, info.sources, into, deadline, begun)
            if info.delta is not None and report.bytes_pulled:
                logger.warning("%d bytes were not right after the delta, and were pulled", report.bytes_pulled)

        wanted = Record(
            *(0, 0, chunks.total_bytes, chunks.root, chunks.chunk_bytes, chunks.digests),
            secret_hash=digest_of(memoryview(self._init.secret.encode())),
            mbytes_per_s=self._init.mbytes_per_s,
        )
        flat = self._staging.receive(wanted, fill, self._init.timeout_s)
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
            _UNFINISHED[self._place] = self._staging

    def _begun(
        self,
        info: HttpUpdateInfo,
        manifest: Manifest,
        chunks: ChunkList,
        into: torch.Tensor,
        before: Record,
        deadline: float,
    ) -> dict[int, int]:
        """Return how many bytes at the front of each chunk may be there, after applying the delta if there is one."""
        everything = dict.fromkeys(range(len(chunks.digests)), chunks.chunk_bytes)
        if not before.holds:  # a pull broke off here
            return everything | (dict(before.begun) if before.part_of == chunks.root else {})
        if info.delta is not None:
            delta = DeltaInfo(**info.delta)
            if delta.base == before.holds:
                self._lay_on(delta, manifest, into, deadline)
                return everything
            logger.warning("a delta was sent to weights that are not here: everything is pulled")
        if before.chunk_bytes != chunks.chunk_bytes:
            return everything
        pairs = enumerate(zip(before.digests, chunks.digests, strict=True))
        return {index: chunks.chunk_bytes for index, (old, new) in pairs if old == new}

    def _lay_on(self, delta: DeltaInfo, manifest: Manifest, into: torch.Tensor, deadline: float) -> None:
        """Apply the deltas to `into`. If that fails, the digests of the result tell what to pull."""
        chunks = ChunkList(**delta.chunks)
        payload = torch.empty(chunks.total_bytes, dtype=torch.uint8)
        try:
            self._pulled(chunks, [delta.url], payload, deadline)
            for part in torch.split(payload, delta.sizes):
                apply(part, into, manifest)
        except (DeltaError, TransferError, RuntimeError) as error:  # RuntimeError: sizes that do not fit
            logger.warning("the delta could not be used: %s", error)

    def _pulled(
        self,
        chunks: ChunkList,
        urls: list[str],
        into: torch.Tensor,
        deadline: float,
        begun: dict[int, int] | None = None,
    ) -> PullReport:
        """Block until `into` holds the blob of `chunks`. `begun`: see `Pull`.

        Raises:
            TransferError: It did not arrive; `BrokeOff` where another pull into the same memory can continue.
        """
        if self._closed:
            raise TransferError("the learner was let go")
        timeout_s = max(0.1, deadline - time.monotonic())
        self._pull = pull = Pull(chunks, self._init.secret, urls, bytes_of(into), timeout_s, begun)
        try:
            return pull.run()
        except TransferError as error:
            if pull.abandoned:
                self._staging.forget_buffer()
                raise
            then = "another try of this version continues from there"
            if not pull.report.bytes_pulled:
                then = (
                    "is that where this server reaches the learner? Set weight_sync.host, and a weight_sync.http_port "
                    "that is open to it"
                )
            raise BrokeOff(f"{error}; {then}", pull.begun) from error
