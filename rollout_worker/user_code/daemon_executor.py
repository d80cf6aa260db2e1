"""The threads of `asyncio.to_thread` and `loop.run_in_executor(None, ...)` in async user code.

asyncio's own executor has few threads, gives none back that hangs, and keeps the process from ending. Here a job that
nobody waits for any more, because its coroutine was given up, is counted in `hung` until it comes back, and another
thread takes its place. The threads are daemons.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeAlias

from rollout_worker.user_code.forks import end_if_copy
from rollout_worker.user_code.threads import HUNG_PER_THREAD

_Jobs: TypeAlias = "SimpleQueue[_Job | None]"


class _Job(Future[Any]):
    def __init__(self, work: Callable[[], Any], abandoned: Callable[[_Job], None]) -> None:
        super().__init__()
        self.work: Callable[[], Any] | None = work
        self.at_work = False
        self.hung = False
        self._abandoned = abandoned

    def cancel(self) -> bool:
        """As asyncio asks when who awaits the job is cancelled. One at work goes on, and nobody waits for it."""
        cancelled = super().cancel()
        if not cancelled:
            self._abandoned(self)
        return cancelled


class DaemonExecutor(ThreadPoolExecutor):
    """`limit`: jobs at work at one time; `hung`: jobs given up that have not come back; `on_hung` is called at each new
    one, in any thread. Any thread may submit. It is a `ThreadPoolExecutor` because asyncio takes no other."""

    def __init__(self, limit: int, on_hung: Callable[[], None] = lambda: None) -> None:
        super().__init__(limit)  # which starts no thread before its own `submit`
        self.hung = 0
        self._limit = limit
        self._on_hung = on_hung
        self._lock = threading.Lock()
        self._closed = False
        self._busy = 0
        self._free: list[_Jobs] = []
        self._waiting: deque[_Job] = deque()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Raises `RuntimeError` where too many hang, or the machine gives no more threads."""
        job = _Job(lambda: function(*arguments, **named), self._abandoned)
        with self._lock:
            if self.hung >= HUNG_PER_THREAD * self._limit:
                raise RuntimeError(
                    f"not called in a thread: {self.hung} calls have not come back, and no more threads are given; "
                    f"give what waits a time-out of its own"
                )
            if self._busy < self._limit:
                self._begin(job)
            else:
                self._waiting.append(job)
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: event loops that close do not own it. See `close`."""

    def close(self) -> None:
        """Let idle threads end; those at work end with their jobs."""
        with self._lock:
            self._closed = True
            while self._free:
                self._free.pop().put(None)

    def _begin(self, job: _Job) -> None:
        """Under the lock."""
        if self._free:
            self._free.pop().put(job)
        else:
            jobs: _Jobs = SimpleQueue()
            jobs.put(job)
            threading.Thread(target=_serve, args=(jobs, self, os.getpid()), daemon=True, name="user code").start()
        job.at_work = True
        self._busy += 1

    def _abandoned(self, job: _Job) -> None:
        with self._lock:
            if not job.at_work or job.hung:
                return
            job.hung = True
            self._busy -= 1
            self.hung += 1
            self._begin_waiting()
        self._on_hung()

    def came_back(self, job: _Job, jobs: _Jobs) -> None:
        """`jobs`: of the thread that it ran in, which is free now."""
        with self._lock:
            job.at_work = False
            if job.hung:
                self.hung -= 1
            else:
                self._busy -= 1
            if self._closed:
                jobs.put(None)
                return
            self._free.append(jobs)
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._busy < self._limit:
            job = self._waiting.popleft()
            try:
                self._begin(job)
            except RuntimeError as error:  # no more threads
                if job.set_running_or_notify_cancel():
                    job.set_exception(error)


def _serve(jobs: _Jobs, executor: DaemonExecutor, pid: int) -> None:
    """A thread's life, in the process `pid`."""
    while (job := jobs.get()) is not None:
        _run(job, executor, jobs, pid)
        del job


def _run(job: _Job, executor: DaemonExecutor, jobs: _Jobs, pid: int) -> None:
    work, job.work = job.work, None
    assert work is not None
    try:
        if job.set_running_or_notify_cancel():
            result = work()
            end_if_copy(pid)
            job.set_result(result)
    except BaseException as error:
        end_if_copy(pid, error)
        job.set_exception(error)
    finally:
        executor.came_back(job, jobs)
