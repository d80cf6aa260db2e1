"""A worker's end of the gloo transport: receives and verifies one snapshot at a time.

Workers that can map each other's memory receive once: the first of them (`GlooGroup.leader`) tells the others where it
is. A delta is applied to the snapshot before, which the buffer still holds. If that does not give the new snapshot, bit
for bit, at every worker that receives, the whole snapshot is sent after it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_128

from slipstream.weight_sync.transports.base import TransferError
from slipstream.weight_sync.transports.gloo.group import BAD_DIGEST, NOT_MAPPED, OK, GlooGroup, GlooInitInfo
from slipstream.weight_sync.transports.receiver import HostShares, Share, Worker
from slipstream.weight_sync.weights.delta_codec import DeltaError, apply
from slipstream.weight_sync.weights.host_memory import Staging, mapped
from slipstream.weight_sync.weights.manifest import Manifest
from slipstream.weight_sync.weights.snapshot import digest_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeltaInfo:
    """The deltas from one snapshot to the new one, sent one behind the other in the order to apply them.

    Attributes:
        base: Digest of the snapshot to apply them to, in hex.
        sizes: Bytes of each payload.
    """

    base: str
    sizes: list[int]

    def check_size(self, whole_bytes: int) -> None:
        """Raise ValueError if the payloads are not smaller than the whole snapshot."""
        if min(self.sizes, default=-1) < 0 or sum(self.sizes) >= max(1, whole_bytes):
            raise ValueError(f"a delta of {self.sizes} bytes for weights of {whole_bytes}")


@dataclass(frozen=True)
class GlooUpdateInfo(Manifest):
    """Body of `/update_weights`: the manifest, and the fields of a `DeltaInfo` if only deltas are sent."""

    delta: dict[str, Any] | None = None


class GlooReceiver:
    """See `Receiver`. The bytes are in its own buffer, made once, or in its leader's."""

    def __init__(self, info: dict[str, Any], worker: Worker) -> None:
        """Join the learner's group. Blocks until all ranks have come."""
        joined = GlooInitInfo(**info)
        self._group = GlooGroup.join(joined, worker.rank)
        self._device = worker.device
        self._staging = Staging(bool(self._group.followers), worker.device)
        self._shares = HostShares(worker.device, joined.bucket_bytes)
        self._theirs: tuple[tuple[int, int, int], torch.Tensor] | None = None
        # Digest of the snapshot that the buffer holds whole, empty if it holds none.
        self._digest = b""

    def close(self) -> None:
        """Do nothing: the group ends with its last reference, which a running `receive` may hold."""

    def receive(self, update: dict[str, Any]) -> Share:
        """Receive a snapshot and tell the learner whether its digest agrees.

        Raises:
            TransferError: The digest does not agree.
            RuntimeError: The learner or the leader is gone or late.
            ValueError: `update` contradicts itself.
        """
        info = GlooUpdateInfo(**update)
        size = info.total_bytes()
        delta = DeltaInfo(**info.delta) if info.delta is not None else None
        if delta is not None:
            delta.check_size(size)
        leads = self._group.leader == self._group.rank
        return self._shares.share(info, self._received(info, size, delta) if leads else self._mapped(size))

    def _received(self, manifest: Manifest, size: int, delta: DeltaInfo | None) -> torch.Tensor:
        before, self._digest = self._digest, b""
        flat = self._staging.take(size)
        if delta is None:
            status = self._whole(flat)
        else:
            status = self._laid_on(flat, manifest, delta, before)
            self._group.tell(0, status)
            (everything,) = self._group.hear(0)  # another worker may need it
            if everything:
                status = self._whole(flat)
        for rank in self._group.followers:
            self._group.tell(rank, status, *self._staging.place)
        self._group.tell(0, status)
        return _right(flat, status)

    def _whole(self, flat: torch.Tensor) -> int:
        found = xxh3_128()
        for bucket in self._group.buckets(flat):
            found.update(bucket.numpy().data)
        return self._compared(found.digest())

    def _laid_on(self, flat: torch.Tensor, manifest: Manifest, delta: DeltaInfo, before: bytes) -> int:
        payload = torch.empty(sum(delta.sizes), dtype=torch.uint8)
        for _ in self._group.buckets(payload):
            pass
        found = b""
        try:
            if before.hex() != delta.base:
                raise DeltaError("it is for other weights than those that are here")
            for part in torch.split(payload, delta.sizes):
                apply(part, flat, manifest)
            found = digest_of(flat)
        except DeltaError as error:
            logger.warning("the delta could not be used: %s", error)
        return self._compared(found)

    def _compared(self, found: bytes) -> int:
        sent = torch.tensor(self._group.hear(0, 2)).numpy().tobytes()
        self._digest = found if found == sent else b""
        return OK if found == sent else BAD_DIGEST

    def _mapped(self, size: int) -> torch.Tensor:
        status, pid, fd = self._group.hear(self._group.leader, 3)
        place = (pid, fd, size)
        try:
            if self._theirs is None or self._theirs[0] != place:
                self._theirs = (place, mapped(*place, self._device))
        except OSError as error:
            self._group.tell(0, NOT_MAPPED)
            raise TransferError(f"the memory of the worker that received cannot be mapped: {error}") from error
        self._group.tell(0, status)
        return _right(self._theirs[1], status)


def _right(flat: torch.Tensor, status: int) -> torch.Tensor:
    if status != OK:
        raise TransferError("what arrived has another digest than what was sent")
    return flat
