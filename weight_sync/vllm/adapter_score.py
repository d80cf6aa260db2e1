"""Log-probs under a loaded adapter, whether it serves or not: computed inside the workers, beside generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weight_sync.vllm import proof_score
from weight_sync.vllm.active_adapter import put_under
from weight_sync.vllm.proof_routes import given_logprobs, given_token_ids
from weight_sync.vllm.route import RouteError

if TYPE_CHECKING:
    from weight_sync.vllm.adapter_shelf import Shelf


async def score(shelf: Shelf, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """`{"token_ids": [[int]]}` -> `{"logprobs": [[float]]}`, in nats at temperature 1; 501 where it cannot be done.

    Raises `RouteError`.
    """
    engine, adapter = shelf.engine, shelf.adapter(name)
    if adapter is None:
        raise RouteError(409, f"the adapter {name} is not loaded")
    token_ids = given_token_ids(engine, body)
    which = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
    return given_logprobs(await engine.collective_rpc("slipstream_score_adapter", args=(token_ids, which)))


class AdapterMixin:
    """Methods for `collective_rpc`, each on the worker's own thread between two steps of the engine."""

    model_runner: Any

    def slipstream_score_adapter(self, token_ids: list[list[int]], which: tuple[str, int, str]) -> dict[str, Any]:
        """As `ProofMixin.slipstream_score`, under the adapter of this name, number and folder."""
        from vllm.lora.request import LoRARequest

        scores = []
        for ids in token_ids:
            if (reason := proof_score.reason_not_to(self.model_runner, len(ids))) is not None:
                return {"cannot": reason}
            put_under(self.model_runner, len(ids), LoRARequest(*which))
            scores.append(proof_score.score(self.model_runner, ids))
        return {"logprobs": None if None in scores else scores}
