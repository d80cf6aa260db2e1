"""A worker's reception of one snapshot over gloo: into staging, on a thread, verified."""

from __future__ import annotations

import logging
import threading

import torch

from weight_sync.manifest import Manifest
from weight_sync.snapshot import digest_of
from weight_sync.transports.gloo.group import BAD_DIGEST, OK, GlooGroup

logger = logging.getLogger(__name__)


class Reception(threading.Thread):
    """One snapshot on its way. `views` (tensors by name) is set once the digest agreed, `error` when it failed."""

    def __init__(self, group: GlooGroup, manifest: Manifest) -> None:
        super().__init__(name="weight-reception", daemon=True)
        self.views: dict[str, torch.Tensor] | None = None
        self.error: str | None = None
        self._group = group
        self._manifest = manifest

    def run(self) -> None:
        try:
            flat = torch.empty(self._manifest.total_bytes(), dtype=torch.uint8)
            self._group.broadcast_in_buckets(flat)
            digest = torch.empty(32, dtype=torch.uint8)
            self._group.broadcast(digest)
            if digest_of(flat) == digest.numpy().tobytes():
                self.views = self._manifest.views(flat)
                self._group.send_status(OK)
            else:
                self.error = "the digest of what arrived is not the learner's"
                self._group.send_status(BAD_DIGEST)
        except Exception as error:
            # The learner may be gone; the caller of /finish_weight_update is told.
            self.views = None
            self.error = f"{type(error).__name__}: {error}"
            logger.warning("weights did not arrive: %s", self.error)
