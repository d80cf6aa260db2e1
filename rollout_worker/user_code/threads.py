"""Runs sync user code in a limited number of threads, and gives each call up after its time-out.

Invariant: all decisions are made on the caller's event loop. A thread only runs the call and reports back.

A call that was given up counts in `hung` until it returns, and another thread takes the place of its own. So calls that
never return take no threads from others. When `HUNG_PER_THREAD` times as many calls hang as there are threads, new
calls fail at once. A call waits for a thread as long as necessary, because each running call returns or is given up.
The threads are daemons: none keeps the process from ending.

`ShutOff` shuts user code off for good when so many calls hang that no new ones are started, and none of them returns.
Slow code returns and frees its thread, and only hung code does not. The decision therefore depends on whether any call
has returned, and not on how long calls were refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from protocol import reasons
from rollout_worker.user_code.errors import (
    NotCalled,
    UserCodeError,
    defined_at,
    end_if_copy,
    failure_in,
    name_of,
    place_in,
)

HUNG_PER_THREAD = 4

_Jobs: TypeAlias = "SimpleQueue[_Call | None]"


@dataclass(slots=True, eq=False)
class _Call:
    """One call that a thread runs.

    Attributes:
        came_back: Called on `loop` after the thread has run the call.
        loop: The caller's event loop.
        future: Set on `loop` when the call has ended or is late.
        function: The user's function, named in errors.
        step: The work of the thread. The thread drops it, so that the objects it holds are not freed on the loop.
        timeout_s: Seconds that the call may take once it has a thread.
        asked_at: Time of the loop's clock when the call was requested, in seconds.
        begun: Set when the wait for a thread is over. None if the call did not wait.
        waited_s: Seconds that the call waited for a thread.
        thread: Identifier of the thread that runs the call, or None before that.
        timer: Gives the call up after its time-out. While the call waits, it reports a long wait.
        given_up: True if the call was late.
        failed: True if `outcome` is an error.
        outcome: Result of `step`, or its error.
    """

    came_back: Callable[[_Jobs, _Call], None]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    function: Callable[..., Any]
    step: Callable[[], Any] | None
    timeout_s: float
    asked_at: float
    begun: asyncio.Event | None = None
    waited_s: float = 0.0
    thread: int | None = None
    timer: asyncio.TimerHandle | None = None
    given_up: bool = False
    failed: bool = False
    outcome: Any = None

    def work(self, pid: int) -> None:
        """Run `step` in this thread and record its outcome.

        Args:
            pid: Process that started the thread. A copy made with `os.fork` ends here.
        """
        assert self.step is not None
        self.thread = threading.get_ident()
        try:
            self.outcome = self.step()
            end_if_copy(pid)
        except BaseException as error:
            end_if_copy(pid, error)
            self.failed, self.outcome = True, failure_in(self.function, error)
        self.step = None

    def settle(self, error: UserCodeError | None = None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():
            self.outcome = None
            return
        if error is None and self.failed:
            error = self.outcome
        if error is None:
            self.future.set_result(None)
        else:
            error.waited_s = self.waited_s
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class _Start:
    """Requests a new thread for `call`.

    Attributes:
        jobs: Queue of the new thread.
        call: First call of the new thread.
        failed: Called on the loop if the machine provides no more threads.
    """

    jobs: _Jobs
    call: _Call
    failed: Callable[[_Call, str], None]


class Threads:
    """Runs sync calls in daemon threads.

    Any event loop may call, one at a time.

    Args:
        limit: Maximum number of running calls, hung ones not counted.
        on_hung: Called each time a call starts to count as hung.
        on_full: Called with a text if a call has waited for a thread as long as its time-out.
        remedy: Advice to the user if calls hang.
        after_cancel_s: Seconds that a running call may still take when its caller has gone. None allows it the rest of
            its time-out.

    Attributes:
        hung: Number of calls that were given up and are still running.
        came_back: Number of calls that were given up and have returned since.
        longest_s: The longest time-out of any call, in seconds.
    """

    def __init__(
        self,
        limit: int,
        on_hung: Callable[[], None] = lambda: None,
        on_full: Callable[[str], None] = lambda text: None,
        remedy: str = "mend what hangs",
        after_cancel_s: float | None = None,
    ) -> None:
        self.limit = limit
        self.remedy = remedy
        self.came_back = 0
        self.longest_s = 0.0
        self._most_hung = HUNG_PER_THREAD * limit
        self._hung: set[_Call] = set()
        self._on_hung = on_hung
        self._on_full = on_full
        self._after_cancel_s = after_cancel_s
        self._working = 0
        self._idle: list[_Jobs] = []
        self._starter: SimpleQueue[_Start | None] | None = None
        self._waiting: deque[_Call] = deque()

    @property
    def hung(self) -> int:
        return len(self._hung)

    @property
    def full(self) -> bool:
        """True if so many calls hang that no new calls are started."""
        return self.hung >= self._most_hung

    def hanging(self) -> str:
        """Describe the function with the most hung calls, with file:line. At least one call must hang."""
        calls: dict[str, list[_Call]] = {}
        for call in self._hung:
            calls.setdefault(name_of(call.function), []).append(call)
        name, those = max(calls.items(), key=lambda item: len(item[1]))
        where = place_in(those[0].function, those[0].thread)
        place = f" ({where})" if where else ""
        return f"{self.hung} calls have not come back, {len(those)} of them of {name}{place}"

    async def run(
        self,
        function: Callable[..., Any],
        step: Callable[[], Any],
        timeout_s: float,
        waiting: AbstractContextManager[None] | None = None,
    ) -> Any:
        """Run `step` in a thread and return its result.

        Args:
            function: The user's function, named in errors.
            step: The work to do.
            timeout_s: Seconds that the call may take, counted from when it has a thread.
            waiting: Context that is entered while the call waits for a thread.

        Raises:
            UserCodeError: The call failed or was late.
            NotCalled: Too many calls hang.
        """
        loop = asyncio.get_running_loop()
        call = _Call(self._came_back, loop, loop.create_future(), function, step, timeout_s, loop.time())
        self.longest_s = max(self.longest_s, timeout_s)
        if self.full:
            raise self._refusal(function)
        if self._working < self.limit:
            self._begin(call)
        else:
            call.timer = loop.call_later(timeout_s, self._waits_long, call)
            call.begun = asyncio.Event()
            self._waiting.append(call)
        try:
            if call.begun is not None:
                with waiting or nullcontext():
                    await call.begun.wait()
            await call.future
            return call.outcome
        except asyncio.CancelledError:
            call.future.cancel()
            self._cancelled(call)
            raise
        finally:
            call.outcome = None  # Otherwise it would live as long as the frames of the error.

    def close(self) -> None:
        """End idle threads. Busy threads end when their calls do."""
        self.limit = 0
        if self._starter is not None:
            self._starter.put(None)
        while self._idle:
            self._idle.pop().put(None)

    def __del__(self) -> None:
        self.close()

    def _begin(self, call: _Call) -> None:
        if self._idle:
            self._idle.pop().put(call)
        else:
            jobs: _Jobs = SimpleQueue()
            if self._starter is None:
                self._starter = SimpleQueue()
                _start(_start_all, self._starter)
            self._starter.put(_Start(jobs, call, self._not_started))
        self._working += 1
        call.timer = call.loop.call_later(call.timeout_s, self._give_up, call)

    def _not_started(self, call: _Call, why: str) -> None:
        text = f"not called: {why}; lower worker.user_threads, or raise the limit of processes (ulimit -u)"
        if call.given_up:
            self._hung.discard(call)
        else:
            self._working -= 1
        call.settle(UserCodeError(text, "RuntimeError", defined_at(call.function)))
        self._begin_waiting()

    def _came_back(self, jobs: _Jobs, call: _Call) -> None:
        if call.given_up:
            self._hung.discard(call)
            self.came_back += 1
            call.outcome = None
        else:
            self._working -= 1
            call.settle()
        if self.limit == 0:
            jobs.put(None)
            return
        self._idle.append(jobs)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and (self.full or self._working < self.limit):
            call = self._waiting.popleft()
            if call.timer is not None:
                call.timer.cancel()
            if call.future.done():  # The caller has gone.
                continue
            call.waited_s = call.loop.time() - call.asked_at
            if call.begun is not None:
                call.begun.set()
            if self.full:
                call.settle(self._refusal(call.function))
            else:
                self._begin(call)

    def _refusal(self, function: Callable[..., Any]) -> NotCalled:
        return NotCalled(
            f"not called: {self.hanging()}, and no more threads are given: {self.remedy}",
            reasons.TIMEOUT,
            defined_at(function),
        )

    def _give_up(self, call: _Call) -> None:
        call.given_up = True
        self._working -= 1
        self._hung.add(call)
        text = f"no answer within {call.timeout_s:g} s"
        call.settle(UserCodeError(text, reasons.TIMEOUT, defined_at(call.function)))
        self._on_hung()
        self._begin_waiting()

    def _cancelled(self, call: _Call) -> None:
        begun = call not in self._waiting and not call.given_up and call.step is not None
        if begun and self._after_cancel_s is not None and call.timer is not None:
            call.timer.cancel()
            call.timer = call.loop.call_later(self._after_cancel_s, self._give_up, call)

    def _waits_long(self, call: _Call) -> None:
        if not call.future.done():
            self._on_full(
                f"no thread was free within {call.timeout_s:g} s: all {self.limit} are at work; raise "
                f"worker.user_threads, or make slow code async"
            )


def _start_all(starts: SimpleQueue[_Start | None]) -> None:
    """Start threads on request, in a thread of its own, until it receives None.

    `Thread.start` waits until the new thread runs. This takes long if many threads compete for the interpreter lock,
    and the event loop must not wait for it.
    """
    while (wanted := starts.get()) is not None:
        wanted.jobs.put(wanted.call)
        try:
            _start(_serve, wanted.jobs)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
                wanted.call.loop.call_soon_threadsafe(wanted.failed, wanted.call, str(error))
        del wanted


def _start(target: Callable[[Any], None], jobs: SimpleQueue[Any]) -> None:
    threading.Thread(target=target, args=(jobs,), daemon=True, name="user code").start()


def _serve(jobs: _Jobs) -> None:
    """Run calls in this thread until it receives None.

    An idle thread holds nothing but its queue, so that the threads of a forgotten `Threads` can be ended.
    """
    pid = os.getpid()
    while (call := jobs.get()) is not None:
        call.work(pid)
        with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
            call.loop.call_soon_threadsafe(call.came_back, jobs, call)
        del call


# User code is shut off if no call has returned for this many times the longest time-out.
TIMEOUTS = 4

# Minimum of that wait, in seconds.
AT_MIN_S = 60.0


class CallPool(Protocol):
    """A pool of calls that may hang, as `ShutOff` sees it: `Threads`, or `Loops` of async code.

    Attributes:
        longest_s: The longest time-out of any call, in seconds.
        remedy: Advice to the user if calls hang.
        full: True if so many calls hang that no new calls are started.
        came_back: Number of calls that have returned. It grows whenever a hung call returns.
        hanging: Describes the functions that hang, with file:line.
    """

    longest_s: float
    remedy: str

    @property
    def full(self) -> bool: ...
    @property
    def came_back(self) -> int: ...
    def hanging(self) -> str: ...


class ShutOff:
    """Watches full pools and decides when user code is shut off for good.

    Args:
        told: Called with the cause when user code is shut off.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._watched: dict[CallPool, asyncio.TimerHandle] = {}

    def look(self, source: CallPool) -> None:
        """Watch the pool if it is full. Call this on the event loop each time a call starts to hang."""
        if source.full and source not in self._watched:
            self._wait(source)

    def close(self) -> None:
        while self._watched:
            self._watched.popitem()[1].cancel()

    def _wait(self, source: CallPool) -> None:
        seconds = max(AT_MIN_S, TIMEOUTS * source.longest_s)
        loop = asyncio.get_running_loop()
        self._watched[source] = loop.call_later(seconds, self._check, source, source.came_back, seconds)

    def _check(self, source: CallPool, came_back: int, seconds: float) -> None:
        del self._watched[source]
        if not source.full:
            return
        if source.came_back > came_back:
            self._wait(source)
            return
        self._told(
            f"user code is shut off: {source.hanging()}; none has come back for {seconds:g} s, and no more are begun: "
            f"{source.remedy}"
        )
