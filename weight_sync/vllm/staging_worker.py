"""The worker's side of a swap."""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger(__name__)


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

    def slipstream_exchange(self) -> float | str:
        """Exchange the live weights for the staged ones; seconds that it took, or why it failed, which leaves the model
        unknown. What a worker raises reaches the engine as vLLM's words for it, without the cause."""
        began = time.monotonic()
        try:
            self.finish_weight_update()  # type: ignore[attr-defined]
        except Exception as error:
            logger.exception("the exchange of the weights failed")
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return time.monotonic() - began
