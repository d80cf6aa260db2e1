"""Entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

BACKEND = "gloo"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "gloo"}'` known to vLLM; safe to call again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weight_sync.transports.gloo.engine", "GlooEngine")
