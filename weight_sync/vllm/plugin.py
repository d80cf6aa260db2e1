"""Registers Slipstream with vLLM, which calls `register` in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

import contextlib

from weight_sync.transports.registry import TRANSPORTS, backend


def register() -> None:
    """Add the swap to the engine core, quicken the start, and register the engine of every transport.

    `--weight-transfer-config '{"backend": NAME}'` then chooses an engine, which is imported when it is used. May be
    called again.
    """
    from weight_sync.vllm import cpu_start
    from weight_sync.vllm.engine import engine_core

    engine_core.install_swap()
    cpu_start.install()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, ends in TRANSPORTS.items():
        module, _, engine = ends.engine.partition(":")
        if ends.replaces:
            WeightTransferEngineFactory._registry.pop(backend(name), None)
        with contextlib.suppress(ValueError):  # an earlier call, or vLLM itself, has registered it
            WeightTransferEngineFactory.register_engine(backend(name), module, engine)
