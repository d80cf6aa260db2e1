"""Registers Slipstream with vLLM, which calls `register` in each of its processes (`vllm.general_plugins`).

It also starts vLLM's CPU build in a third of the time: torch and vLLM are imported once instead of four times. On a
CPU, vLLM 0.32 starts three new interpreters one after the other: its engine, the engine's worker, and a helper that
inspects a model class it has not seen before. Each imports torch and vLLM again, which takes 15 s of CPU time. Here the
class is inspected in the API process and the engine is forked from it; `deploy.servers.vllm_server` keeps the worker
inside the engine. This replaces two internals of vLLM, `registry._run_in_subprocess` and the platform's
`check_and_update_config`.
"""

from __future__ import annotations

import contextlib
import os
from functools import wraps
from typing import TYPE_CHECKING, Any

from slipstream.weight_sync.transports.registry import TRANSPORTS, backend

if TYPE_CHECKING:
    from slipstream.weight_sync.vllm.engine.contract import VllmConfig

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def register() -> None:
    """Add the swap to the engine core, quicken the start, and register the engine of every transport.

    `--weight-transfer-config '{"backend": NAME}'` then chooses an engine, which is imported when it is used. May be
    called again.
    """
    from slipstream.weight_sync.vllm.engine import engine_core

    engine_core.install_swap()
    quicken_cpu_start()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, ends in TRANSPORTS.items():
        module, _, engine = ends.engine.partition(":")
        if ends.replaces:
            WeightTransferEngineFactory._registry.pop(backend(name), None)
        with contextlib.suppress(ValueError):  # an earlier call, or vLLM itself, has registered it
            WeightTransferEngineFactory.register_engine(backend(name), module, engine)


def quicken_cpu_start() -> None:
    """Replace both internals, on a CPU only. Runs in each of vLLM's processes, and may be called again."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(type(current_platform), "slipstream_cpu_start"):
        return
    from vllm.model_executor.models import registry

    # vLLM inspects in another process, as the import of a model class may initialise CUDA before a fork.
    registry._run_in_subprocess = lambda inspect: inspect()
    fork_engine(type(current_platform))


def fork_engine(platform: Any) -> None:
    """Have the engine forked, if that is safe, after the platform has asked for a new interpreter."""
    check = platform.check_and_update_config

    @wraps(check)
    def check_and_update_config(vllm_config: VllmConfig) -> None:
        check(vllm_config)
        if may_fork(vllm_config.parallel_config.distributed_executor_backend):
            os.environ[METHOD] = "fork"

    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.slipstream_cpu_start = True


def may_fork(executor: Any) -> bool:
    """Return whether the engine may be forked from the API server.

    A forked process that uses OpenMP waits forever for the threads of its parent, unless it computes on a single one.
    Workers of the `mp` executor read their number of threads only when they start as new interpreters.

    Args:
        executor: vLLM's `distributed_executor_backend`.
    """
    return os.environ.get("OMP_NUM_THREADS") == "1" and executor != "mp"
