"""What a server computes and holds under a loaded adapter, whether it serves or not: asked of the workers, beside
generation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.vllm.active_adapter import put_under
from weight_sync.vllm.engine import score_proof
from weight_sync.vllm.engine.fingerprints import Reading
from weight_sync.vllm.proof_routes import given_logprobs, given_token_ids, read
from weight_sync.vllm.route import RouteError

if TYPE_CHECKING:
    from weight_sync.vllm.loaded_adapters import LoadedAdapters


async def score(shelf: LoadedAdapters, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """`{"token_ids": [[int]]}` -> `{"logprobs": [[float]]}`, in nats at temperature 1; 501 where it cannot be done.

    Raises `RouteError`.
    """
    which = _which(shelf, name)
    token_ids = given_token_ids(shelf.engine, body)
    return given_logprobs(await shelf.engine.collective_rpc("slipstream_score_adapter", args=(token_ids, which)))


async def layers(shelf: LoadedAdapters, name: str) -> dict[str, Any]:
    """As `proof_routes.layers`: the layers of a loaded adapter against the bytes that arrived. Raises `RouteError`."""
    begun = await shelf.engine.collective_rpc("slipstream_read_adapter", args=(_which(shelf, name),))
    return await read(shelf.engine, begun)


def _which(shelf: LoadedAdapters, name: str) -> tuple[str, int, str]:
    """Name, number and folder of an adapter. Raises `RouteError`."""
    adapter = shelf.adapter(name)
    if adapter is None:
        raise RouteError(409, f"the adapter {name} is not loaded")
    return adapter.lora_name, adapter.lora_int_id, adapter.lora_path


class AdapterMixin:
    """Methods for `collective_rpc`, each on the worker's own thread between two steps of the engine."""

    model_runner: Any
    _slipstream_reading: Reading

    def slipstream_score_adapter(self, token_ids: list[list[int]], which: tuple[str, int, str]) -> dict[str, Any]:
        """As `ProofMixin.slipstream_score`, under the adapter of this name, number and folder."""
        from vllm.lora.request import LoRARequest

        scores = []
        for ids in token_ids:
            if (reason := score_proof.reason_not_to(self.model_runner, len(ids))) is not None:
                return {"cannot": reason}
            put_under(self.model_runner, len(ids), LoRARequest(*which))
            scores.append(score_proof.score(self.model_runner, ids))
        return {"logprobs": None if None in scores else scores}

    def slipstream_read_adapter(self, which: tuple[str, int, str]) -> dict[str, Any]:
        """Begin to compare what this worker holds of an adapter; `slipstream_layers` tells what was found."""
        from weight_sync.vllm.engine import adapter_proof

        name, _, folder = which
        copied = adapter_proof.copy_adapter_slots(self.model_runner, which)
        self._slipstream_reading = adapter_proof.AdapterReading(copied, name, Path(folder))
        self._slipstream_reading.start()
        return {}
