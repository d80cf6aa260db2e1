"""Adds methods to each of vLLM's workers: `--worker-extension-cls slipstream.weight_sync.vllm.worker.SlipstreamWorker`.

`weight_sync.vllm.engines.ask_workers` calls them, on the worker's own thread between two steps of the engine. vLLM
refuses an extension with an attribute that the worker has, so every name begins with `slipstream_`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from slipstream.weight_sync.vllm.engine import layer_proof, score_proof
from slipstream.weight_sync.vllm.engine.contract import ModelRunner, RecordsOfWorker
from slipstream.weight_sync.vllm.engine.layer_proof import Reading
from slipstream.weight_sync.vllm.engine.score_proof import put_under

logger = logging.getLogger(__name__)


class SlipstreamWorker:
    """Mixed into vLLM's own worker class, whose attributes these are."""

    model_runner: ModelRunner
    weight_transfer_engine: Any
    _weight_update_active: bool
    _slipstream_reading: Reading

    def slipstream_score(self, token_ids: list[list[int]], which: tuple[str, int, str] | None = None) -> dict[str, Any]:
        """Score sequences under the adapter `which` (name, number and folder), or under the model alone.

        Returns:
            `logprobs`: T-1 values of each sequence, None on a worker without logits; or `cannot`: why not.
        """
        from vllm.lora.request import LoRARequest

        for ids in token_ids:
            if (reason := score_proof.reason_not_to(self.model_runner, len(ids))) is not None:
                return {"cannot": reason}
        scores = []
        for ids in token_ids:
            put_under(self.model_runner, len(ids), None if which is None else LoRARequest(*which))
            scores.append(score_proof.score(self.model_runner, ids))
        return {"logprobs": None if None in scores else scores}

    def slipstream_read_adapter(self, which: tuple[str, int, str]) -> dict[str, Any]:
        """Begin to compare an adapter on this worker with its file. `slipstream_layers` returns the findings."""
        from slipstream.weight_sync.vllm.engine import adapter_proof

        name, _, folder = which
        copied = adapter_proof.copy_adapter_slots(self.model_runner, which)
        self._slipstream_reading = adapter_proof.AdapterReading(copied, name, Path(folder))
        self._slipstream_reading.start()
        return {}

    def slipstream_read_layers(self) -> dict[str, Any]:
        """Begin to read the live layers on a thread. Returns `cannot`, the reason, if that is not possible."""
        proven = getattr(self.weight_transfer_engine, "proven", None)
        if proven is None:
            return {"cannot": "no weights were staged and proven before they were loaded"}
        model = self.model_runner.model
        # Layers that cannot be read are multiplied here, on the engine's thread: their functions allow no other.
        probed = layer_proof.probe_products(model, proven)
        self._slipstream_reading = layer_proof.ModelReading(model, proven, probed)
        self._slipstream_reading.start()
        return {}

    def slipstream_layers(self) -> dict[str, Any]:
        """Return the findings: the fields of `fingerprints.Difference`, {} while they are not complete."""
        reading = self._slipstream_reading
        return {} if reading.is_alive() else reading.result()

    def slipstream_staging(self) -> dict[str, Any]:
        """Return `StagedEngine.staging` of this worker, without waiting; and `tower`, whether the weights that embed
        images are among those staged."""
        staging = getattr(self.weight_transfer_engine, "staging", None)
        if staging is None:
            return {"stage": "failed", "error": "the transport of this server loads in place", "seconds": {}}
        shadow = getattr(self.weight_transfer_engine, "shadow", None)
        return {**staging(), "tower": bool(getattr(shadow, "of_tower", False))}

    def slipstream_drop_update(self) -> bool:
        """Drop an open update, as vLLM does with one that fails. Returns whether there was one."""
        was_open = self._weight_update_active
        if was_open:
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()
        return was_open

    def slipstream_exchange(self) -> float | str:
        """Exchange the live weights for the staged ones.

        An error is returned, not raised: vLLM would pass it on without its cause. The model is unknown then.

        Returns:
            Seconds that it took, or why it failed.
        """
        began = time.monotonic()
        try:
            self.finish_weight_update()  # type: ignore[attr-defined]
        except Exception as error:
            logger.exception("the exchange of the weights failed")
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return time.monotonic() - began

    def slipstream_forget_records(self, request_ids: list[str]) -> None:
        """Drop what was recorded of these requests, which begin again. Between two steps of the engine."""
        records: RecordsOfWorker | None = getattr(self.model_runner, "aux_output_connector", None)
        if records is None or records._buffer is None:
            return
        with records._lock:
            known = [request_id for request_id in request_ids if request_id in records._requests]
            keys = [key for request_id in known for key in reversed(records._requests[request_id].aux_output_keys)]
            records._publish_blocks([], release_keys=keys)
            records._teardown(known)
