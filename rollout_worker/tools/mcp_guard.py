"""Starts an MCP server and ensures that none of its processes outlives the worker, even if the worker is killed.

Run it as a program, `mcp_guard.py PID COMMAND...`, where `PID` is the worker's. It needs only the standard library.
The server gets this process's stdin and stdout and belongs to its process group. Its exit code is passed on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(worker: int, command: list[str]) -> int:
    signal.signal(signal.SIGUSR1, _end_all)
    # The whole group gets this signal, and this process must wait while the server ends. It has a handler and is not
    # ignored, because the server would inherit that.
    signal.signal(signal.SIGTERM, _wait_on)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
        if os.getppid() != worker:
            return 1
    # On other systems a server ends when its stdin does, as the protocol requires.
    try:
        code = subprocess.Popen(command).wait()
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return 128 - code if code < 0 else code


def _end_all(number: int, frame: object) -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _wait_on(number: int, frame: object) -> None:
    return None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
