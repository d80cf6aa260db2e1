"""What a vLLM worker does for the proof; a part of `weight_sync.vllm.worker.SlipstreamWorker`.

vLLM calls these by `collective_rpc` on the engine's thread, between two steps. It refuses an extension whose names its
own worker has, so all begin with `slipstream_`.
"""

from __future__ import annotations

from typing import Any

from weight_sync.vllm import proof_layers, proof_score


class ProofMixin:
    """`model_runner` and `weight_transfer_engine` are the worker's."""

    def slipstream_score(self, token_ids: list[list[int]]) -> dict[str, Any]:
        """`logprobs`: T-1 values of each sequence, None on a worker without logits; or `cannot`: why not."""
        runner = self.model_runner  # type: ignore[attr-defined]
        for ids in token_ids:
            if (reason := proof_score.reason_not_to(runner, len(ids))) is not None:
                return {"cannot": reason}
        scores = [proof_score.score(runner, ids) for ids in token_ids]
        return {"logprobs": None if None in scores else scores}

    def slipstream_layers(self) -> dict[str, Any]:
        """`checked`, `wrong` and `unread`, see `proof_layers.Difference`; or `cannot`: why not."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        proven = getattr(engine, "proven", None)
        if proven is None:
            return {"cannot": "no weights were staged and proven before they were loaded"}
        live = proof_layers.held(self.model_runner.model)  # type: ignore[attr-defined]
        return vars(proof_layers.compare(proven, live))
