"""vLLM's start on a CPU: what is imported once instead of four times, and where that would be unsafe."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.weight_sync.vllm import plugin

IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@pytest.mark.parametrize(
    ("threads", "executor", "method"),
    [
        ("1", IN_ENGINE, "fork"),
        # OpenMP's threads do not survive a fork, and waiting for them never ends.
        ("2", IN_ENGINE, "spawn"),
        (None, IN_ENGINE, "spawn"),
        # A worker process sets the number of its threads as it starts again.
        ("1", "mp", "spawn"),
    ],
)
def test_the_engine_is_forked_where_it_computes_alone_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, threads: str | None, executor: str, method: str
) -> None:
    checked: list[Any] = []

    class Platform:
        @staticmethod
        def check_and_update_config(vllm_config: Any) -> None:
            checked.append(vllm_config)
            os.environ[plugin.METHOD] = "spawn"

    monkeypatch.setenv(plugin.METHOD, "as before")
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=executor))
    plugin.fork_engine(Platform)
    Platform.check_and_update_config(config)
    assert checked == [config]
    assert os.environ[plugin.METHOD] == method


def test_the_installed_vllm_has_what_is_replaced_and_it_is_replaced_once() -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the CPU build alone")
    assert hasattr(registry, "_run_in_subprocess")
    plugin.quicken_cpu_start()
    replaced = current_platform.check_and_update_config
    plugin.quicken_cpu_start()
    assert current_platform.check_and_update_config is replaced
    assert registry._run_in_subprocess(lambda: 7) == 7
    assert registry._run_in_subprocess(os.getpid) == os.getpid()
