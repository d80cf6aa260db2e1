"""A worker's reception of one snapshot over gloo, verified.

Workers that can map each other's memory receive once: the first of them (`GlooGroup.leader`) tells the others where.
"""

from __future__ import annotations

import torch
from xxhash import xxh3_128

from weight_sync.manifest import Manifest
from weight_sync.memory import Staging, mapped
from weight_sync.transports.base import TransferError
from weight_sync.transports.gloo.group import BAD_DIGEST, NOT_MAPPED, OK, GlooGroup


class Reception:
    """Where one worker's bytes lie: in a buffer of its own, made once, or in its leader's."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self._staging = Staging(shared=bool(group.followers))
        self._theirs: tuple[tuple[int, int, int], torch.Tensor] | None = None

    def receive(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The snapshot's tensors by name, as views that are good until the next call.

        The learner is told whether the digest agrees. Raises `TransferError` where it does not; RuntimeError where the
        learner or the leader is gone or late.
        """
        size = manifest.total_bytes()
        flat = self._received(size) if self._group.leader == self._group.rank else self._mapped(size)
        return manifest.views(flat)

    def _received(self, size: int) -> torch.Tensor:
        flat = self._staging.take(size)
        found = xxh3_128()
        for bucket in self._group.buckets(flat):
            found.update(bucket.numpy().data)
        sent = torch.tensor(self._group.hear(0, 2)).numpy().tobytes()
        status = OK if found.digest() == sent else BAD_DIGEST
        for rank in self._group.followers:
            self._group.tell(rank, status, *self._staging.place)
        self._group.tell(0, status)
        return _right(flat, status)

    def _mapped(self, size: int) -> torch.Tensor:
        status, pid, fd = self._group.hear(self._group.leader, 3)
        place = (pid, fd, size)
        try:
            if self._theirs is None or self._theirs[0] != place:
                self._theirs = (place, mapped(*place))
        except OSError as error:
            self._group.tell(0, NOT_MAPPED)
            raise TransferError(f"the memory of the worker that received cannot be mapped: {error}") from error
        self._group.tell(0, status)
        return _right(self._theirs[1], status)


def _right(flat: torch.Tensor, status: int) -> torch.Tensor:
    if status != OK:
        raise TransferError("the digest of what arrived is not the learner's")
    return flat
