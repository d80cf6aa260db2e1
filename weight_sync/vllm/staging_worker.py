"""The worker's side of a swap."""

from __future__ import annotations

import time
from typing import Any


class StagingMixin:
    """Methods for `collective_rpc`, each on the worker's own thread between two steps of the engine."""

    weight_transfer_engine: Any
    # vLLM's own, of its worker.
    _weight_update_active: bool

    def slipstream_staging(self) -> dict[str, Any]:
        """`StagedEngine.staging` of this worker, without waiting."""
        staging = getattr(self.weight_transfer_engine, "staging", None)
        if staging is None:
            return {"stage": "failed", "error": "the transport of this server loads in place", "seconds": {}}
        report: dict[str, Any] = staging()
        return report

    def slipstream_drop_update(self) -> bool:
        """Drop the update that is open, as vLLM does with one that fails; whether one was."""
        was_open = self._weight_update_active
        if was_open:
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()
        return was_open

    def slipstream_exchange(self) -> float:
        """Exchange the live weights for the staged ones; seconds that it took.

        Raises, before anything is touched, where they are not ready; what it raises else leaves the model unknown.
        """
        began = time.monotonic()
        self.finish_weight_update()  # type: ignore[attr-defined]
        return time.monotonic() - began
