"""One child process that tools run in, as its parent sees it: start, ask, kill.

Requests and replies are lines of JSON over pipes, nothing else (I8); a reply names its request, and any other line is
dropped. The child has a process group of its own, which is
killed as a whole; it ends by itself when its parent is gone (`child.py`), and then the guard ends its group. All but
`kill` may block: call them in a thread.

Child processes for tools that may not come back: started where needed, used again, killed when late.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from protocol import access, reasons
from protocol.config import TaskSection
from rollout_worker.user_code.errors import UserCodeError
from rollout_worker.user_code.group_guard import GroupGuard
from rollout_worker.user_code.threads import Threads

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

# A reply is longer than its text by what JSON escapes: up to twelve times.
_MAX_REPLY_BYTES = 16 * 1024 * 1024

# While one reply is awaited, lines that are not it: a few may come from a copy that a tool made of the child.
MAX_STRAY_LINES = 100

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
        for _ in range(1 + MAX_STRAY_LINES):
            line = self._process.stdout.readline(_MAX_REPLY_BYTES)
            if not line.endswith(b"\n"):
                # Before it is reaped: what it has started is in its group, whose number is free after that.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                raise UserCodeError(f"its process ended {_how(self._process.wait())}", DIED, where)
            if (reply := _reply(line, number)) is not None:
                return reply
        self.kill()
        raise UserCodeError(
            f"its process was killed: it wrote {MAX_STRAY_LINES} lines to the pipe of its replies that are not the "
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


# Importing the task file may take a while, above all beside others.
START_S = 120.0


class Processes:
    """At most `limit` children, as many as calls run at once; each is a fresh interpreter that imports the task file. A
    child serves one call at a time. `on_full` is called with the text where a call has waited for a child for as
    long as its time-out."""

    def __init__(self, limit: int, task_file: TaskSection, on_full: Callable[[str], None] = lambda text: None) -> None:
        self.limit = limit
        self._on_full = on_full
        self._task_path = f"{task_file.file.resolve()}:{task_file.object_name}"
        self._guard = GroupGuard()
        self._threads = Threads(limit)
        self._slots = asyncio.Semaphore(limit)
        self._starts = asyncio.Semaphore(os.cpu_count() or 1)
        self._idle: list[ChildProcess] = []
        self._all: set[ChildProcess] = set()

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """The tool's result as text; the time-out counts from when a child is ready. Raises `UserCodeError`."""
        text = f"no process was free within {timeout_s:g} s: all {self.limit} are at work; raise worker.user_threads"
        waits_long = asyncio.get_running_loop().call_later(timeout_s, self._on_full, text)
        try:
            await self._slots.acquire()
        finally:
            waits_long.cancel()
        try:
            child = self._idle.pop() if self._idle else await self._started()
            # Here and not in the thread, which comes later: a call that is cancelled until then has a busy child.
            child.ready = False
            try:
                ask = partial(child.ask, tool, arguments)
                return str(await self._threads.run(child.ask, ask, timeout_s))
            except UserCodeError as error:
                error.where = child.places.get(tool) if error.kind == reasons.TIMEOUT else error.where
                raise
            finally:
                self._give_back(child)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Kill them all."""
        children = list(self._all)
        for child in children:
            child.kill()
        for child in children:
            child.reap()
        self._guard.close()
        self._all.clear()
        self._idle.clear()
        self._threads.close()

    async def _started(self) -> ChildProcess:
        async with self._starts:
            if self._idle:  # one came free while others were started
                return self._idle.pop()
            child = ChildProcess(self._task_path, self._guard)
            self._all.add(child)
            try:
                await self._threads.run(child.start, child.start, START_S)
            except BaseException:
                self._give_back(child)  # it may be ready where the call was cancelled
                raise
            return child

    def _give_back(self, child: ChildProcess) -> None:
        """A child that is not ready may have a thread at work on it, or before it: it serves no other call."""
        if child.ready:
            self._idle.append(child)
        else:
            self._end(child)

    def _end(self, child: ChildProcess) -> None:
        child.kill()
        self._all.discard(child)
