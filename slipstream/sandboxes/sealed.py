"""Runs Python programs in sealed processes. Untrusted code runs in `sealed_program.py`, never in this process."""

from __future__ import annotations

import json
import os
import platform
import select
import subprocess
import sys
from pathlib import Path
from typing import cast

from slipstream.processes import HelperPool, Limits
from slipstream.sandboxes.base import Sandbox

MACHINES = ("x86_64", "aarch64")  # `sealed_program.py` knows their system calls.
LIMITS = Limits(5.0, 256, 4096)
# Seconds for a helper to start, beyond a program's.
_PATIENCE_S = 10


class SealedSandbox(Sandbox):
    """Runs up to `processes` programs at a time, each in a fork of a helper process that already runs Python: some
    milliseconds a program. The kernel refuses the fork all but computing and printing (Linux).

    A helper is started when it is first needed, ends with this process, and is replaced when it has ended.

    Args:
        limits: What a program may use; the first bytes of its output are kept.
        processes: Maximum number of programs at a time; None for the number of cores.
        cpu_seconds: CPU time of a program.
    """

    def __init__(self, limits: Limits = LIMITS, processes: int | None = None, cpu_seconds: int = 1) -> None:
        super().__init__(limits)
        self._cpu_seconds = cpu_seconds
        self._helpers = HelperPool(self._started, processes or os.cpu_count() or 1)

    def _run(self, code: str) -> str:
        with self._helpers.one() as helper:
            answer = _asked(helper, code, self.limits.seconds + _PATIENCE_S)
        if "refused" in answer:
            raise RuntimeError(f"the sandbox cannot seal a process: {answer['refused']}")
        return answer["output"]

    def close(self) -> None:
        """End the idle helpers."""
        self._helpers.close()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start a helper isolated from this process: no environment variables, no open files, no site-packages.

        Raises:
            RuntimeError: If the sandbox does not support this machine.
        """
        if sys.platform != "linux" or platform.machine() not in MACHINES:
            raise RuntimeError(
                f"the sandbox needs Linux on {' or '.join(MACHINES)}, and this is {sys.platform} on "
                f"{platform.machine()}: run programs elsewhere, by another sandbox of slipstream.sandboxes"
            )
        program = Path(__file__).with_name("sealed_program.py")
        limits = (
            self.limits.seconds,
            self._cpu_seconds,
            (self.limits.memory_mb or 1 << 20) << 20,
            self.limits.output_characters,
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )


def _asked(helper: subprocess.Popen[bytes], code: str, patience_s: float) -> dict[str, str]:
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        helper.stdin.write(json.dumps(code).encode() + b"\n")
        helper.stdin.flush()
        if not select.select([helper.stdout], [], [], patience_s)[0]:
            raise RuntimeError(f"the sandbox's process did not answer within {patience_s:g} s")
        line = helper.stdout.readline()
    except OSError as error:
        raise RuntimeError(f"the sandbox's process is gone: {error}") from error
    if not line:
        raise RuntimeError(f"the sandbox's process ended with code {helper.wait()}")
    return cast(dict[str, str], json.loads(line))
