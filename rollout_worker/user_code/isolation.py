"""One child process that tools run in, as its parent sees it: start, ask, kill.

Requests and replies are lines of JSON over pipes, nothing else (I8); a reply names its request, and any other line is
dropped. The child has a process group of its own, which is
killed as a whole; it ends by itself when its parent is gone (`child.py`), and then the guard ends its group. All but
`kill` may block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from protocol import access
from rollout_worker.user_code.errors import UserCodeError
from rollout_worker.user_code.group_guard import GroupGuard

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

# A reply is longer than its text by what JSON escapes: up to twelve times.
_MOST_REPLY_BYTES = 16 * 1024 * 1024

# While one reply is awaited, lines that are not it: a few may come from a copy that a tool made of the child.
MOST_STRAY_LINES = 100

DIED = "died"


class ChildProcess:
    """A child for the task file `task_path`. `ready`: it waits for a request, and no thread is at work on it; its owner
    clears it before a thread is asked to `ask`, which sets it when it is done. `places`: file:line of its tools."""

    def __init__(self, task_path: str, guard: GroupGuard) -> None:
        self.ready = False
        self.places: dict[str, str | None] = {}
        self._task_path = task_path
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Returns when the child has imported the task file. Raises `UserCodeError`."""
        path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        with self._lock:
            if self._killed:
                raise UserCodeError("its process was killed", DIED, None)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout_worker.task.isolated_child", self._task_path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**access.environment_without_token(os.environ), "PYTHONPATH": path},
                start_new_session=True,
            )
            self._guard.add(self._process.pid)
        hello = self._read(0, None)
        if "refused" in hello:
            self.kill()
            raise UserCodeError(f"its process cannot load the task: {hello['refused']}", DIED, None)
        self.places = hello["places"]
        self.ready = True

    def ask(self, tool: str, arguments: dict[str, Any]) -> str:
        """The tool's result as text; one call at a time. Raises `UserCodeError`; if the child is not `ready` then, it
        is of no more use."""
        assert self._process is not None
        assert self._process.stdin is not None
        number = next(self._numbers)
        try:
            line = json.dumps({"id": number, "tool": tool, "arguments": arguments}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            self.ready = True
            text = f"its arguments cannot be sent to a process as JSON: {error}"
            raise UserCodeError(text, type(error).__name__, self.places.get(tool)) from None
        with contextlib.suppress(OSError):  # it died: reading says how
            self._process.stdin.write(line)
            self._process.stdin.flush()
        reply = self._read(number, self.places.get(tool))
        self.ready = True
        if "error" in reply:
            raise UserCodeError(reply["error"], reply["kind"], reply["where"])
        return str(reply["result"])

    def kill(self) -> None:
        """End it, and what it has started."""
        with self._lock:
            if self._process is not None and not self._killed:
                if self._process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                self._guard.remove(self._process.pid)
            self.ready, self._killed = False, True

    def reap(self) -> None:
        """Wait until it has ended, after `kill`."""
        if self._process is not None:
            self._process.wait()

    def _read(self, number: int, where: str | None) -> dict[str, Any]:
        """The reply to the request of that number; 0 is what it says when it has started."""
        assert self._process is not None
        assert self._process.stdout is not None
        for _ in range(1 + MOST_STRAY_LINES):
            line = self._process.stdout.readline(_MOST_REPLY_BYTES)
            if not line.endswith(b"\n"):
                # Before it is reaped: what it has started is in its group, whose number is free after that.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                raise UserCodeError(f"its process ended {_how(self._process.wait())}", DIED, where)
            if (reply := _reply(line, number)) is not None:
                return reply
        self.kill()
        raise UserCodeError(
            f"its process was killed: it wrote {MOST_STRAY_LINES} lines to the pipe of its replies that are not the "
            f"reply; do not write to file descriptors that the tool did not open, nor go on after os.fork",
            DIED,
            where,
        )


def _reply(line: bytes, number: int) -> dict[str, Any] | None:
    """What the line says, None if it is not the reply to the request of that number."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) and reply.get("id") == number else None


def _how(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"
