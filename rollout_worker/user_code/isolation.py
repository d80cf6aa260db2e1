"""Runs tools that may hang in child processes, which are started when needed, used again, and killed when late.

Invariant: only lines of JSON pass between parent and child, over pipes (I8). A reply names its request, and any other
line is dropped.

`ChildProcess` is the parent's side of one child. The child has its own process group, which is killed as a whole.
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
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import Any

from slipstream.protocol import access, reasons
from slipstream.protocol.config import TaskSection
from slipstream.protocol.import_path import python_path
from slipstream.rollout_worker.user_code.errors import UserCodeError
from slipstream.rollout_worker.user_code.process_guard import ProcessGuard, signal_group

# JSON escapes can make a reply up to twelve times as long as its text.
_MAX_REPLY_BYTES = 16 * 1024 * 1024

# Seconds for a start: importing the task file may take a while, above all while other children start.
START_S = 120.0

DIED = "died"


class ChildProcess:
    """One child process, which serves one call at a time.

    Args:
        process: The child.
        guard: Kills the child's group if the worker is killed.

    Attributes:
        ready: True while the child waits for a request.
        places: The file:line of each tool, by name.
    """

    def __init__(self, process: Process, guard: ProcessGuard) -> None:
        self.ready = False
        self.places: dict[str, str | None] = {}
        self._process = process
        self._guard = guard
        self._numbers = itertools.count(1)
        guard.add(process.pid)

    @classmethod
    async def start(cls, task_path: str, guard: ProcessGuard) -> ChildProcess:
        """Start a child."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slipstream.rollout_worker.task.isolated_child", task_path),
            stdin=PIPE,
            stdout=PIPE,
            limit=_MAX_REPLY_BYTES,
            env={**access.environment_without_token(os.environ), "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        return cls(process, guard)

    async def load(self) -> None:
        """Wait until the child has imported the task file. Raises `UserCodeError` if it cannot."""
        hello = await self._read(0, None)
        if "refused" in hello:
            raise UserCodeError(f"its process cannot load the task: {hello['refused']}", DIED, None)
        self.places = hello["places"]
        self.ready = True

    async def ask(self, tool: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text.

        Raises:
            UserCodeError: The call failed. If the child is not `ready` afterwards, it cannot be used again.
        """
        assert self._process.stdin is not None
        number = next(self._numbers)
        try:
            line = json.dumps({"id": number, "tool": tool, "arguments": arguments}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            text = f"its arguments cannot be sent to a process as JSON: {error}"
            raise UserCodeError(text, type(error).__name__, self.places.get(tool)) from None
        self.ready = False
        with contextlib.suppress(OSError):  # The child died. The read below reports how.
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        reply = await self._read(number, self.places.get(tool))
        self.ready = True
        if "error" in reply:
            raise UserCodeError(reply["error"], reply["kind"], reply["where"])
        return str(reply["result"])

    async def end(self) -> None:
        """Kill the child and everything that it started."""
        self.ready = False
        # Before the child is reaped, because the number of its group is free after that.
        if self._process.returncode is None:
            signal_group(self._process.pid, signal.SIGKILL)
        self._guard.remove(self._process.pid)
        await self._process.wait()

    async def _read(self, number: int, where: str | None) -> dict[str, Any]:
        """Return the reply to a request. Lines that are none are dropped: a copy of the child may write some.

        Args:
            number: Number of the request. 0 is the message that the child sends when it has started.
            where: The file:line of the tool, named in errors.

        Raises:
            UserCodeError: The child ended.
        """
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # The line is longer than a reply can be.
                continue
            if not line:
                signal_group(self._process.pid, signal.SIGKILL)  # It holds what the child started.
                raise UserCodeError(f"its process ended {_how(await self._process.wait())}", DIED, where)
            with contextlib.suppress(ValueError, RecursionError):
                reply = json.loads(line)
                if isinstance(reply, dict) and reply.get("id") == number:
                    return reply


def _how(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"


class Processes:
    """Owns the child processes and gives each call one of them.

    There are as many children as calls that run at once. Each is a fresh interpreter that imports the task file, and
    serves one call at a time.

    Args:
        limit: Maximum number of children.
        task_file: The task file whose tools the children run.
        on_full: Called with a text if a call has waited for a child for as long as its time-out.
    """

    def __init__(self, limit: int, task_file: TaskSection, on_full: Callable[[str], None]) -> None:
        self.limit = limit
        self._on_full = on_full
        self._task_path = f"{task_file.file.resolve()}:{task_file.object_name}"
        self._guard = ProcessGuard()
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
            try:
                async with asyncio.timeout(timeout_s):
                    return await child.ask(tool, arguments)
            except TimeoutError:
                raise _late(timeout_s, child.places.get(tool)) from None
            finally:
                await self._give_back(child)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Kill all children."""
        await asyncio.gather(*(child.end() for child in self._all))
        self._guard.close()
        self._all.clear()
        self._idle.clear()

    async def _started(self) -> ChildProcess:
        async with self._starts:
            if self._idle:  # A child became free while others were started.
                return self._idle.pop()
            child = await ChildProcess.start(self._task_path, self._guard)
            self._all.add(child)
            try:
                async with asyncio.timeout(START_S):
                    await child.load()
            except TimeoutError:
                raise _late(START_S, None) from None
            finally:
                if not child.ready:
                    await self._give_back(child)
            return child

    async def _give_back(self, child: ChildProcess) -> None:
        """Keep a child that is ready, and end any other, which may still be at work."""
        if child.ready:
            self._idle.append(child)
        else:
            await child.end()
            self._all.discard(child)


def _late(timeout_s: float, where: str | None) -> UserCodeError:
    return UserCodeError(f"no answer within {timeout_s:g} s", reasons.TIMEOUT, where)
