"""Runs tools that may hang in child processes, which are started when needed, used again, and killed when late.

Invariant: only lines of JSON pass between parent and child, over pipes (I8). A reply names its request, and any other
line is dropped.

`ChildProcess` is the parent's side of one child. The child has a process group of its own, which is killed as a whole.
The child ends by itself when its parent is gone (`task/isolated_child.py`), and then the guard ends its group.
`Processes` owns the children and assigns calls to them.
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
from typing import Any

from slipstream.protocol import access, reasons
from slipstream.protocol.config import TaskSection
from slipstream.protocol.import_path import python_path
from slipstream.rollout_worker.user_code.errors import UserCodeError
from slipstream.rollout_worker.user_code.process_guard import ProcessGuard, signal_group
from slipstream.rollout_worker.user_code.threads import Threads

# JSON escapes can make a reply up to twelve times as long as its text.
_MAX_REPLY_BYTES = 16 * 1024 * 1024

# Maximum number of other lines to drop while one reply is awaited. A copy that a tool made of the child may write some.
MAX_STRAY_LINES = 100

DIED = "died"


class ChildProcess:
    """Starts one child process, asks it and kills it.

    All methods except `kill` may block, so call them in a thread.

    Args:
        task_path: The task, as `path/to/file.py:task`.
        guard: Kills the child's group if the worker is killed.

    Attributes:
        ready: True while the child waits for a request and no thread uses it. The owner clears it before a thread calls
            `ask`, which sets it when it is done.
        places: The file:line of each tool, by name.
    """

    def __init__(self, task_path: str, guard: ProcessGuard) -> None:
        self.ready = False
        self.places: dict[str, str | None] = {}
        self._task_path = task_path
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child and wait until it has imported the task file.

        Raises:
            UserCodeError: The child was killed, ended, or cannot load the task.
        """
        path = python_path()
        with self._lock:
            if self._killed:
                raise UserCodeError("its process was killed", DIED, None)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.rollout_worker.task.isolated_child", self._task_path],
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
        """Call a tool and return its result as text. Make one call at a time.

        Raises:
            UserCodeError: The call failed. If the child is not `ready` afterwards, it cannot be used again.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        number = next(self._numbers)
        try:
            line = json.dumps({"id": number, "tool": tool, "arguments": arguments}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            self.ready = True
            text = f"its arguments cannot be sent to a process as JSON: {error}"
            raise UserCodeError(text, type(error).__name__, self.places.get(tool)) from None
        with contextlib.suppress(OSError):  # The child died. The read below reports how.
            self._process.stdin.write(line)
            self._process.stdin.flush()
        reply = self._read(number, self.places.get(tool))
        self.ready = True
        if "error" in reply:
            raise UserCodeError(reply["error"], reply["kind"], reply["where"])
        return str(reply["result"])

    def kill(self) -> None:
        """Kill the child and everything that it started."""
        with self._lock:
            if self._process is not None and not self._killed:
                if self._process.returncode is None:
                    signal_group(self._process.pid, signal.SIGKILL)
                self._guard.remove(self._process.pid)
            self.ready, self._killed = False, True

    def reap(self) -> None:
        """Wait until the child has ended. Call it after `kill`."""
        if self._process is not None:
            self._process.wait()

    def _read(self, number: int, where: str | None) -> dict[str, Any]:
        """Return the reply to a request.

        Args:
            number: Number of the request. 0 is the message that the child sends when it has started.
            where: The file:line of the tool, named in errors.

        Raises:
            UserCodeError: The child ended, or was killed because it wrote too many other lines.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        for _ in range(1 + MAX_STRAY_LINES):
            line = self._process.stdout.readline(_MAX_REPLY_BYTES)
            if not line.endswith(b"\n"):
                # Kill the group before the child is reaped, because the group's number is free after that. The group
                # holds what the child started.
                signal_group(self._process.pid, signal.SIGKILL)
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
    """Parse a line. Returns None if it is not the reply to the request of that number."""
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


# Seconds for a start: importing the task file may take a while, above all while other children start.
START_S = 120.0


class Processes:
    """Owns the child processes and gives each call one of them.

    There are as many children as calls that run at once. Each is a fresh interpreter that imports the task file, and
    serves one call at a time.

    Args:
        limit: Maximum number of children.
        task_file: The task file whose tools the children run.
        on_full: Called with a text if a call has waited for a child for as long as its time-out.
    """

    def __init__(self, limit: int, task_file: TaskSection, on_full: Callable[[str], None] = lambda text: None) -> None:
        self.limit = limit
        self._on_full = on_full
        self._task_path = f"{task_file.file.resolve()}:{task_file.object_name}"
        self._guard = ProcessGuard()
        self._threads = Threads(limit)
        self._slots = asyncio.Semaphore(limit)
        self._starts = asyncio.Semaphore(os.cpu_count() or 1)
        self._idle: list[ChildProcess] = []
        self._all: set[ChildProcess] = set()

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool in a child and return its result as text.

        Args:
            tool: Name of the tool.
            arguments: Arguments of the tool, by name.
            timeout_s: Seconds that the call may take, counted from when a child is ready.

        Raises:
            UserCodeError: The tool failed or was late, or its child did not start or ended.
        """
        text = f"no process was free within {timeout_s:g} s: all {self.limit} are at work; raise worker.user_threads"
        waits_long = asyncio.get_running_loop().call_later(timeout_s, self._on_full, text)
        try:
            await self._slots.acquire()
        finally:
            waits_long.cancel()
        try:
            child = self._idle.pop() if self._idle else await self._started()
            # Clear this here and not in the thread, which runs later: if the call is cancelled before then, its child
            # must already count as busy.
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
        """Kill all children."""
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
            if self._idle:  # A child became free while others were started.
                return self._idle.pop()
            child = ChildProcess(self._task_path, self._guard)
            self._all.add(child)
            try:
                await self._threads.run(child.start, child.start, START_S)
            except BaseException:
                self._give_back(child)  # If the call was cancelled, the child may still be ready.
                raise
            return child

    def _give_back(self, child: ChildProcess) -> None:
        """Keep a child that is ready, and end any other.

        A child that is not ready may be in use by a thread, or be about to be, so it must not serve another call.
        """
        if child.ready:
            self._idle.append(child)
        else:
            self._end(child)

    def _end(self, child: ChildProcess) -> None:
        child.kill()
        self._all.discard(child)
