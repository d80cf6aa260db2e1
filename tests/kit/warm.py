"""Starts Python programs in a second, as copies of one process that has imported vLLM and the learner.

The imports take that process ten seconds. It is `python -m tests.kit.warm`, and it ends all its copies when its input
ends.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# Modules read these variables on import, so they have the servers' values. There is one thread, because a copy cannot
# use the OpenMP threads of its original.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
# Servers, engines, learners and workers import these while they start.
MODULES = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen3.modeling_qwen3",
    "deploy.cli",
    "learner.run",
    "rollout_queue.service",
    "rollout_worker.worker",
)
# Builds the engine in the script's own process.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
SCRIPT_LIMIT_S = 200.0


class Warm:
    """Starts programs and scripts while the context is open. Only one thread at a time may call it."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.warm"],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> WarmProcess:
        """Start `python -m MODULE ARGUMENTS` in a session of its own.

        Args:
            command: A command line of Python, with `-m`.
            env: The whole environment of the program.
            log: File to which its output is appended.
        """
        module, *arguments = command[command.index("-m") + 1 :]
        paths = (str(log), str(log))
        return WarmProcess(self, self.ask("start", module, arguments, {**env, **ENVIRONMENT}, *paths))

    def run(self, folder: Path, script: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Run a script and return what it prints.

        Args:
            folder: Folder for the script and its output; one for each script.
            script: Python code, which may build an engine in its process.
            *arguments: The script's `sys.argv[1:]`.
            env: Variables to add to this process's environment.

        Raises:
            AssertionError: The script failed. The text has the end of its stderr.
        """
        (folder / "script.py").write_text(script, encoding="utf-8")
        stdout, stderr = folder / "stdout", folder / "stderr"
        whole = {**os.environ, **ENVIRONMENT, **IN_PROCESS, **(env or {})}
        pid = self.ask("start", str(folder / "script.py"), arguments, whole, str(stdout), str(stderr))
        code = self.ask("wait", pid)
        assert code == 0, f"ended with {code}:\n{stderr.read_text()[-3000:]}"
        return stdout.read_text()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Send a request to the process and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class WarmProcess:
    """Is one of the copies, with the part of a `Popen` that `deploy.run.processes.Child` uses."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self.pid = pid
        self._warm = warm
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._warm.ask("poll", self.pid)
        return self._code


def _serve() -> None:
    """Start, wait for and end copies of this process, as requests on its input ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Output of the imports must not mix with answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in MODULES:
        importlib.import_module(name)
    living: set[int] = set()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "start":
            if (pid := os.fork()) == 0:
                answers.close()
                _become(*arguments)
            living.add(pid)
            answer: int | None = pid
        else:
            (pid,) = arguments
            ended, status = os.waitpid(pid, 0 if what == "wait" else os.WNOHANG)
            living -= {ended}
            answer = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(answer), file=answers, flush=True)
    for pid in living:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # a normal exit would take seconds to unload all the imports


def _become(program: str, arguments: list[str], env: dict[str, str], stdout: str, stderr: str) -> None:
    """Run a module or a script in this copy, and then end the copy as an interpreter ends."""
    os.setsid()
    for number, name in ((1, stdout), (2, stderr)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [program, *arguments]
    code = 0
    try:
        if program.endswith(".py"):
            signal.alarm(int(SCRIPT_LIMIT_S))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
