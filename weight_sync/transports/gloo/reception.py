"""A worker's reception of one snapshot over gloo, verified."""

from __future__ import annotations

import torch

from weight_sync.manifest import Manifest
from weight_sync.snapshot import digest_of
from weight_sync.transports.base import TransferError
from weight_sync.transports.gloo.group import BAD_DIGEST, OK, GlooGroup


def receive(group: GlooGroup, manifest: Manifest, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The snapshot's tensors by name, as views of `flat`: uint8 [manifest.total_bytes()].

    The learner is told whether the digest agrees. Raises `TransferError` where it does not; RuntimeError where the
    learner is gone or late.
    """
    group.broadcast_in_buckets(flat)
    digest = torch.empty(32, dtype=torch.uint8)
    group.broadcast(digest)
    if digest_of(flat) != digest.numpy().tobytes():
        group.send_status(BAD_DIGEST)
        raise TransferError("the digest of what arrived is not the learner's")
    group.send_status(OK)
    return manifest.views(flat)
