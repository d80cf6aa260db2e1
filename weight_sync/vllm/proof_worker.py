"""The worker's side of the proof; a part of `weight_sync.vllm.worker.SlipstreamWorker`."""

from __future__ import annotations

from typing import Any

from weight_sync.vllm.active_adapter import put_under
from weight_sync.vllm.engine import fingerprints, layer_proof, score_proof


class ProofMixin:
    """Methods for `collective_rpc`, each on the worker's own thread between two steps of the engine."""

    model_runner: Any
    weight_transfer_engine: Any
    _slipstream_reading: fingerprints.Reading

    def slipstream_score(self, token_ids: list[list[int]]) -> dict[str, Any]:
        """`logprobs`: T-1 values of each sequence, None on a worker without logits; or `cannot`: why not."""
        for ids in token_ids:
            if (reason := score_proof.reason_not_to(self.model_runner, len(ids))) is not None:
                return {"cannot": reason}
        scores = []
        for ids in token_ids:
            put_under(self.model_runner, len(ids), None)
            scores.append(score_proof.score(self.model_runner, ids))
        return {"logprobs": None if None in scores else scores}

    def slipstream_read_layers(self) -> dict[str, Any]:
        """Begin to read what the live layers hold, on a thread of its own; `cannot`: why not."""
        proven = getattr(self.weight_transfer_engine, "proven", None)
        if proven is None:
            return {"cannot": "no weights were staged and proven before they were loaded"}
        model = self.model_runner.model
        # What cannot be read is computed with here: on the engine's thread, and no other.
        probed = layer_proof.probe_products(model, proven)
        self._slipstream_reading = fingerprints.ModelReading(model, proven, probed)
        self._slipstream_reading.start()
        return {}

    def slipstream_layers(self) -> dict[str, Any]:
        """What was read, if it is done: `checked`, `wrong` and `unread`, see `proof_layers.Difference`."""
        reading = self._slipstream_reading
        return {} if reading.is_alive() else reading.result()
