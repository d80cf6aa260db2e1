"""Child processes for tools that may not come back: started where needed, used again, killed when late."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from protocol import reasons
from protocol.config import TaskSection
from rollout_worker.user_code.errors import UserCodeError
from rollout_worker.user_code.group_guard import GroupGuard
from rollout_worker.user_code.isolation import ChildProcess
from rollout_worker.user_code.threads import Threads

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
