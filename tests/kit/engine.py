"""Scripts that build vLLM's engine in their own process. Each runs in a copy of one process that has imported vLLM:
the import alone takes ten seconds. `python -m tests.kit.engine` is that process; it runs one script at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

# One thread: a copy cannot use the OpenMP threads of the process that it is made from.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
LIMIT_S = 200


class EngineScripts:
    """Runs scripts one after another; a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.engine"],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=LIMIT_S)

    def run(self, folder: Path, script: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Returns what the script prints; raises AssertionError with the end of its errors where it fails.

        Args:
            folder: Keeps what it writes; one for each script.
            script: Python code.
            arguments: Its `sys.argv[1:]`.
            env: Is added to the environment that all scripts have.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"folder": str(folder), "script": script, "arguments": arguments, "env": env or {}}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline().strip()
        assert code == "0", f"ended with {code or 'all others'}:\n{(folder / 'stderr').read_text()[-3000:]}"
        return (folder / "stdout").read_text()


def _serve() -> None:
    """Run what is asked for, each in a copy of this process."""
    # What LLM(...) imports later, too.
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from transformers.models import qwen3, qwen3_moe

    for package in (qwen3, qwen3_moe):
        dir(package)
    # Nothing but exit codes is written to the pipe: what the imports print is an error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
    os._exit(0)  # to take all the imports down takes seconds


def _run(folder: str, script: str, arguments: list[str], env: dict[str, str]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    signal.alarm(LIMIT_S)
    os.environ.update(env)
    sys.argv = ["script", *arguments]
    code = 1
    try:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
