"""Starts vLLM's CPU build in a third of the time: one import of torch and vLLM where there were four.

vLLM 0.32 starts its engine, the engine's worker, and a helper that inspects a model class it sees for the first time as
new interpreters on a CPU, one after the other, and each imports torch and vLLM anew: 15 s of CPU time each. Here the
class is inspected in the API server, and the engine is forked from it. `deploy.servers.vllm_server`
keeps the worker inside the engine.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def install() -> None:
    """Install both on a CPU. Called in each of vLLM's processes, and harmless when called again."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(type(current_platform), "slipstream_quick_start"):
        return
    from vllm.model_executor.models import registry

    # vLLM keeps the import of a model class out of a process that will fork, as it may initialise CUDA.
    registry._run_in_subprocess = lambda inspect: inspect()
    _fork_engine(type(current_platform))


def _fork_engine(platform: Any) -> None:
    """Have the engine forked, where that is safe, once the platform has asked for a new interpreter."""
    check = platform.check_and_update_config

    @wraps(check)
    def check_and_update_config(vllm_config: Any) -> None:
        check(vllm_config)
        if may_fork(vllm_config.parallel_config.distributed_executor_backend):
            os.environ[METHOD] = "fork"

    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.slipstream_quick_start = True


def may_fork(executor: Any) -> bool:
    """Returns whether the engine may be forked from the API server.

    A forked process cannot use the OpenMP threads of its parent and waits for them without end; one that computes on a
    single thread has none. Workers of the `mp` executor read the number of their threads as new interpreters only.

    Args:
        executor: vLLM's `distributed_executor_backend`.
    """
    return os.environ.get("OMP_NUM_THREADS") == "1" and executor != "mp"
