"""Runs calls of user code in a limited number of threads, and gives each up after its time-out.

Invariant: all decisions are made on the caller's event loop. A thread only runs the call and reports back.

A call that was given up counts in `hung` until it returns, and another thread takes its place. So calls that
never return take no threads from others. When `HUNG_PER_THREAD` times as many calls hang as there are threads, new
calls fail at once. A call waits for a thread as long as necessary, because each running call returns or is given up.
The threads are daemons: none keeps the process from ending.

`ThreadExecutor` hands the jobs of `asyncio.to_thread` and `loop.run_in_executor(None, ...)` to `Threads`. asyncio's own
executor never replaces a thread that hangs, and keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

from slipstream.protocol import reasons
from slipstream.rollout_worker.user_code.call import Call
from slipstream.rollout_worker.user_code.errors import (
    NotCalled,
    UserCodeError,
    contained,
    defined_at,
    name_of,
    place_in,
)

HUNG_PER_THREAD = 4

# Seconds that a job without a time-out waits for a thread before a person is told.
_JOB_WAITS_S = 10.0


class Threads:
    """Runs calls in daemon threads. It is a `CallPool`.

    Any event loop may call, one at a time.

    Args:
        limit: Maximum number of running calls, hung ones not counted.
        on_hung: Called each time a call starts to count as hung.
        on_full: Called with a text if a call has waited for a thread as long as its time-out.
        remedy: Advice to the user if calls hang.
        after_cancel_s: Seconds that a running call may still take when its caller has gone. None allows it the rest of
            its time-out.
    """

    def __init__(
        self,
        limit: int,
        on_hung: Callable[[], None],
        on_full: Callable[[str], None],
        remedy: str,
        after_cancel_s: float | None = None,
    ) -> None:
        self.limit = limit
        self.remedy = remedy
        self.came_back = 0
        self.longest_s = 0.0
        self._max_hung = HUNG_PER_THREAD * limit
        self._hung: set[Call] = set()
        self._on_hung = on_hung
        self._on_full = on_full
        self._after_cancel_s = after_cancel_s
        self._running: set[Call] = set()  # Without those that hang.
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._threads = self._idle = 0
        self._waiting: deque[tuple[Call, float]] = deque()  # With the time of the loop's clock when each was requested.

    @property
    def hung(self) -> int:
        """Number of calls that were given up and are still running."""
        return len(self._hung)

    @property
    def full(self) -> bool:
        return self.hung >= self._max_hung

    def hanging(self) -> str:
        """Describe the function with the most hung calls, with file:line. At least one call must hang."""
        calls: dict[str, list[Call]] = {}
        for call in self._hung:
            calls.setdefault(name_of(call.function), []).append(call)
        name, those = max(calls.items(), key=lambda item: len(item[1]))
        where = place_in(those[0].function, those[0].thread)
        place = f" ({where})" if where else ""
        return f"{self.hung} calls have not come back, {len(those)} of them of {name}{place}"

    def begin(self, call: Call) -> None:
        if self.full:
            raise self._refusal(call)
        call.pool = self
        self.longest_s = max(self.longest_s, call.timeout_s or 0.0)
        if len(self._running) < self.limit:
            self._start(call)
        else:
            call.started = asyncio.Event()
            self._waiting.append((call, call.loop.time()))
            patience_s = _JOB_WAITS_S if call.timeout_s is None else call.timeout_s
            call.timer = call.loop.call_later(patience_s, self._waits_long, patience_s)

    def give_up(self, call: Call) -> None:
        if call.hung or call.finished.is_set():
            return
        call.hung = True
        self._running.discard(call)
        self._hung.add(call)
        call.settle(call.late())
        self._on_hung()
        self._start_waiting()

    def left(self, call: Call) -> None:
        if call.started is not None and not call.started.is_set():
            call.finish()  # It still waits, and will be passed over.
        elif self._after_cancel_s is not None and not call.hung:
            call.start_timer(self._after_cancel_s)

    def close(self) -> None:
        """End the threads, busy ones as their calls end."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _start(self, call: Call) -> None:
        if self._idle == 0:
            try:
                threading.Thread(target=self._serve, daemon=True, name="user code").start()
            except RuntimeError as error:
                call.finish(no_thread(call, error))
                return
            self._threads += 1
        else:
            self._idle -= 1
        self._running.add(call)
        call.start_timer(call.timeout_s)
        self._calls.put(call)

    def _serve(self) -> None:
        """Run calls in this thread until it receives None."""
        while (call := self._calls.get()) is not None:
            call.run()
            with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
                call.loop.call_soon_threadsafe(self._ended, call)
            del call

    def _ended(self, call: Call) -> None:
        """Release the thread of a call that has ended. It runs on the caller's loop."""
        self._idle += 1
        if call.hung:
            self._hung.discard(call)
            self.came_back += 1
        else:
            self._running.discard(call)
        call.thread_ended()
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and (self.full or len(self._running) < self.limit):
            call, asked_at = self._waiting.popleft()
            if not call.wanted:
                continue
            call.waited_s = call.loop.time() - asked_at
            assert call.started is not None
            call.started.set()
            if self.full:
                call.finish(self._refusal(call))
            else:
                self._start(call)

    def _refusal(self, call: Call) -> NotCalled:
        return NotCalled(
            f"not called: {self.hanging()}, and no more threads are given: {self.remedy}",
            reasons.TIMEOUT,
            defined_at(call.function),
        )

    def _waits_long(self, patience_s: float) -> None:
        names = Counter(name_of(call.function) for call in self._running)
        whose = ", ".join(f"{count} of them on {name}" for name, count in names.most_common(1))
        self._on_full(
            f"no thread was free within {patience_s:g} s: all {self.limit} are at work, {whose}; raise "
            f"worker.user_threads, or make slow code async"
        )


def no_thread(call: Call, error: RuntimeError | OSError) -> UserCodeError:
    """Return the error of a call if the machine provides no more threads, or no file that an event loop needs."""
    limit = "the limit of processes (ulimit -u)" if isinstance(error, RuntimeError) else "that of files (ulimit -n)"
    text = f"not called: {error}; lower worker.user_threads, or raise {limit}"
    return UserCodeError(text, type(error).__name__, defined_at(call.function))


class _Job(Future[Any]):
    """A job that async code hands to a thread. `on_leave` is called if it is still running when nobody awaits it."""

    def __init__(self, on_leave: Callable[[_Job], None]) -> None:
        super().__init__()
        self.call: Call | None = None
        self._on_leave = on_leave

    def cancel(self) -> bool:
        """Cancel the job, unless it is running. asyncio calls this when the task that awaits the job is cancelled."""
        cancelled = super().cancel()
        if not (cancelled or self.done()):
            self._on_leave(self)
        return cancelled

    def run(self, work: Callable[[], Any]) -> None:
        """Run the job in this thread. Its result or error goes straight to the code that awaits it."""
        if self.set_running_or_notify_cancel():
            with contained(self.set_exception):
                self.set_result(work())


class ThreadExecutor(ThreadPoolExecutor):
    """Hands jobs from any thread to `Threads`. The base class is one that asyncio accepts; its threads never start.

    Args:
        threads: Runs the jobs.
        grace_s: Seconds that a job may run on when nobody waits for it any more. Then it counts as hung.

    Attributes:
        caller: The event loop that decides about `threads`.
    """

    def __init__(self, threads: Threads, grace_s: float) -> None:
        super().__init__(1)
        self.caller = asyncio.get_running_loop()
        self._pool = threads
        self._grace_s = grace_s

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        job = _Job(self._on_leave)
        self.caller.call_soon_threadsafe(self._begin, job, partial(function, *arguments, **named))
        return job

    def _begin(self, job: _Job, work: Callable[[], Any]) -> None:
        call = job.call = Call(_function_of(work), partial(job.run, work), lambda result: result, None)
        assert call.future is not None
        call.future.add_done_callback(partial(_refuse, job))
        try:
            self._pool.begin(call)
        except NotCalled as error:
            call.finish(error)

    def _on_leave(self, job: _Job) -> None:
        with contextlib.suppress(RuntimeError):  # The caller's loop may be closed by now.
            self.caller.call_soon_threadsafe(self._give_up_later, job)

    def _give_up_later(self, job: _Job) -> None:
        if job.call is not None:
            job.call.start_timer(self._grace_s)


def _refuse(job: _Job, ended: asyncio.Future[None]) -> None:
    """Pass the reason on why a job was not started. A job that runs has its own result."""
    error = ended.exception()
    if error is not None and not (job.running() or job.done()):
        job.set_exception(RuntimeError(str(error)))


def _function_of(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function of a job. `asyncio.to_thread` wraps it in a context's `run`."""
    while isinstance(work, partial):
        runs_in_context = isinstance(getattr(work.func, "__self__", None), contextvars.Context)
        work = work.args[0] if runs_in_context and work.args else work.func
    return work
