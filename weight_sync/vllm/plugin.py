"""Entry point of `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import contextlib

from weight_sync.transports import TRANSPORTS, backend


def register() -> None:
    """Make every transport's engine known to vLLM, for `--weight-transfer-config '{"backend": NAME}'`.

    Engines are imported when used. May be called again.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, ends in TRANSPORTS.items():
        module, _, engine = ends.engine.partition(":")
        with contextlib.suppress(ValueError):  # registered already, by an earlier call or by vLLM itself
            WeightTransferEngineFactory.register_engine(backend(name), module, engine)
