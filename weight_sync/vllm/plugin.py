"""Entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import contextlib

from weight_sync.transports.registry import TRANSPORTS, backend


def register() -> None:
    """Give the engine core our swap, and make every transport known to vLLM by its name, for
    `--weight-transfer-config '{"backend": NAME}'`.

    Engines are imported when used. May be called again.
    """
    from weight_sync.vllm import quick_start
    from weight_sync.vllm.engine import engine_core

    engine_core.install_swap()
    quick_start.install()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, ends in TRANSPORTS.items():
        module, _, engine = ends.engine.partition(":")
        if ends.replaces:
            WeightTransferEngineFactory._registry.pop(backend(name), None)
        with contextlib.suppress(ValueError):  # registered already, by an earlier call or by vLLM itself
            WeightTransferEngineFactory.register_engine(backend(name), module, engine)
