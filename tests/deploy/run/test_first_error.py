"""The first error of a log, in logs as vLLM 0.32 wrote them."""

from __future__ import annotations

import pytest

from slipstream.deploy.run.first_error import first_error

# A model folder without weights: the worker's error is logged among the lines of two other processes.
NO_WEIGHTS = """\
(EngineCore pid=2046) INFO 11-21 15:23:28 [core.py:120] Initializing a V1 LLM engine
(Worker pid=2057) ERROR 11-21 15:23:29 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=2057) ERROR 11-21 15:23:29 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=2057) ERROR 11-21 15:23:29 [multiproc_executor.py:953]   File "default_loader.py", line 259, in _prepare
(EngineCore pid=2046) INFO 11-21 15:23:29 [multiproc_executor.py:479] [shutdown] Executor: waiting for worker
(Worker pid=2057) ERROR 11-21 15:23:29 [multiproc_executor.py:953]     raise RuntimeError(
(Worker pid=2057) ERROR 11-21 15:23:29 [multiproc_executor.py:953] RuntimeError: Cannot find any model weights with `/m`
(EngineCore pid=2046) ERROR 11-21 15:23:31 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2046) ERROR 11-21 15:23:31 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2046) ERROR 11-21 15:23:31 [core.py:1510] Exception: WorkerProc initialization failed
RuntimeError: Engine core initialization failed. See root cause above.
"""
LITTLE_MEMORY = """\
(VllmWorker-0 pid=2554) ERROR 11-21 15:24:11 [multiproc_executor.py:953] WorkerProc failed to start.
(VllmWorker-0 pid=2554) ERROR 11-21 15:24:11 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=2554) ERROR 11-21 15:24:11 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=2554) ERROR 11-21 15:24:11 [multiproc_executor.py:953] ValueError: Available memory on node 0
"""
# pydantic's first line says only that there is an error.
TOO_LONG = """\
(APIServer pid=1816) INFO 11-21 15:22:53 [model.py:733] Resolved architecture: Qwen3ForCausalLM
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (99999) is greater than the derived max_model_len
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
WRONG_FLAG = """\
INFO 11-23 10:01:02 [__init__.py:216] Automatically detected platform cpu.
usage: api_server.py [-h] [--headless] [--api-server-count API_SERVER_COUNT]
                     [--log-level {CRITICAL,ERROR,WARNING,INFO,DEBUG}]
api_server.py: error: unrecognized arguments: --tensor-paralel-size
"""
# The engine was killed: every request fails by it, and more of that than is read of a log's end.
DEAD_ENGINE = """\
(APIServer pid=7) ERROR 11-22 16:00:01 [serving.py:412]     async for res in result_generator:
(APIServer pid=7) ERROR 11-22 16:00:01 [serving.py:412]   File "async_llm.py", line 760, in generate
(APIServer pid=7) ERROR 11-22 16:00:01 [serving.py:412] vllm.v1.engine.exceptions.EngineDeadError: EngineCore
"""
LAST_WORD = "this server ends: its EngineCore process ended (signal 9)\n"
OWN_WORD = """\
(EngineCore pid=9) INFO 11-22 16:00:00 [core.py:120] a step
(EngineCore pid=9) ERROR 11-22 16:00:00 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=9) ERROR 11-22 16:00:00 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-22 16:00:00 [core.py:1512]     raise RuntimeError(
(EngineCore pid=9) ERROR 11-22 16:00:00 [core.py:1512] torch.OutOfMemoryError: no room for 3 GiB
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'the root'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
RuntimeError: what followed
"""


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (NO_WEIGHTS, "RuntimeError: Cannot find any model weights with `/m`"),
        (LITTLE_MEMORY, "ValueError: Available memory on node 0"),
        (
            TOO_LONG,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, "
            "User-specified max_model_len (99999) is greater than the derived max_model_len",
        ),
        (WRONG_FLAG, "api_server.py: error: unrecognized arguments: --tensor-paralel-size"),
        (CHAINED, "KeyError: 'the root'"),
        (DEAD_ENGINE + LAST_WORD, "its EngineCore process ended (signal 9)"),
        (DEAD_ENGINE + OWN_WORD + LAST_WORD, "torch.OutOfMemoryError: no room for 3 GiB"),
        (DEAD_ENGINE, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore"),
        ("slipstream: queue.port = 1: no\nTraceback (most recent call last):\nKeyError\n", "KeyError"),
        ("slipstream: queue.port = 1: no\nsome line\n", "slipstream: queue.port = 1: no"),
        # A full disk or a kill cuts a log short: half a traceback is no cause.
        ("Traceback (most recent call last):\n  File cut short\n", None),
        ("ValueError: before\nTraceback (most recent call last):\n  File cut short\n", "ValueError: before"),
        # srun writes next to the program: what it says of the step may come first.
        ("srun: error: n3: task 0: Exited with exit code 1\nValueError: a fault\n", "ValueError: a fault"),
        (
            "srun: error: n3: task 0: Exited with exit code 2\n" + WRONG_FLAG,
            "api_server.py: error: unrecognized arguments: --tensor-paralel-size",
        ),
        (
            "first words\nsrun: error: n3: task 0: Out Of Memory\n",
            "srun: error: n3: task 0: Out Of Memory",
        ),
        ("INFO all is well\n", None),
    ],
)
def test_the_root_of_what_went_wrong(log: str, first: str | None) -> None:
    assert first_error(log.splitlines()) == first


def test_a_warning_that_the_process_outlived_is_not_the_error() -> None:
    lines = [
        "2026-11-21 16:30:04,657 WARNING slipstream.learner.report.progress: worker-0: reward right: KeyError: 'oops'",
        "slipstream: the first 16 groups failed: reward right: KeyError: 'oops'",
    ]
    assert first_error(lines) == lines[1]
