"""Runs Python programs in sealed processes. Untrusted code runs in `sealed.py`, never in this process."""

from __future__ import annotations

import json
import os
import platform
import queue
import select
import subprocess
import sys
from pathlib import Path

MAX_CODE_CHARACTERS = 10_000  # Characters of a program.
MAX_SECONDS = 5.0  # Wall-clock seconds of a program. It may use one second of CPU time.
MACHINES = ("x86_64", "aarch64")  # `sealed.py` knows their system calls.
_PATIENCE_S = MAX_SECONDS + 10


class Sandbox:
    """Runs up to `processes` programs at a time, each in a fork of a helper process that already runs Python.

    A helper is started when it is first needed, ends with this process, and is replaced when it has ended.

    Args:
        processes: Maximum number of programs at a time; None for the number of cores.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(processes or os.cpu_count() or 1):
            self._idle.put(None)

    def run(self, code: str) -> str:
        """Run a program.

        Args:
            code: Python, at most MAX_CODE_CHARACTERS characters.

        Returns:
            The printed text, cut to a few kilobytes, and after it the error that ended the program.

        Raises:
            RuntimeError: If no program can be run.
        """
        if len(code) > MAX_CODE_CHARACTERS:
            return f"error: the program has {len(code)} characters; at most {MAX_CODE_CHARACTERS} are run"
        helper = self._idle.get()
        try:
            if helper is None or helper.poll() is not None:
                helper = _started()
            answer = _asked(helper, code)
        except BaseException:
            if helper is not None:
                _end(helper)
                helper = None
            raise
        finally:
            self._idle.put(helper)
        if "refused" in answer:
            raise RuntimeError(f"the sandbox cannot seal a process: {answer['refused']}")
        return answer["output"]

    def close(self) -> None:
        """End the idle helpers."""
        for _ in range(self._idle.qsize()):
            helper = self._idle.get()
            if helper is not None:
                _end(helper)
            self._idle.put(None)


def _started() -> subprocess.Popen[bytes]:
    """Start a helper isolated from this process: no environment variables, no open files, no site-packages.

    Raises:
        RuntimeError: If the sandbox does not support this machine.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise RuntimeError(
            f"the sandbox needs Linux on {' or '.join(MACHINES)}, and this is {sys.platform} on {platform.machine()}: "
            f"run programs elsewhere, by a Sandbox.run of your own"
        )
    program = Path(__file__).with_name("sealed.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(program), str(MAX_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )


def _asked(helper: subprocess.Popen[bytes], code: str) -> dict[str, str]:
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        helper.stdin.write(json.dumps(code).encode() + b"\n")
        helper.stdin.flush()
        if not select.select([helper.stdout], [], [], _PATIENCE_S)[0]:
            raise RuntimeError(f"the sandbox's process did not answer within {_PATIENCE_S:g} s")
        line = helper.stdout.readline()
    except OSError as error:
        raise RuntimeError(f"the sandbox's process is gone: {error}") from error
    if not line:
        raise RuntimeError(f"the sandbox's process ended with code {helper.wait()}")
    return json.loads(line)


def _end(helper: subprocess.Popen[bytes]) -> None:
    helper.kill()
    helper.communicate()
