"""Threads for sync code: at most so many at work, each call given up after its time-out.

Every decision is taken on the event loop of the caller; a thread only works and reports back. A thread whose call was
given up is counted in `hung` until it comes back, and another takes its place, so that calls that never return take no
room from others: up to `HUNG_PER_THREAD` times as many, after which calls fail at once. A call waits for a thread as
long as it takes: each one at work comes back, or is given up. The threads are daemons: none keeps the process from
ending.

When user code is shut off for good: so many calls hang that no more are begun, and none of them comes back.

Code that is slow comes back, and makes room; only code that hangs does not. What decides is whether any has come back,
not for how long calls were refused.
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
    """`step` is what the thread does; it is dropped there, so that what it holds is not freed on the loop. `came_back`
    is called on the loop afterwards. begun: set once its wait for a thread is over, None if it had none."""

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
        """`pid`: of the process that the thread was started in."""
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
    """A thread to be started for `call`; `failed` is called on the loop where the machine gives no more."""

    jobs: _Jobs
    call: _Call
    failed: Callable[[_Call, str], None]


class Threads:
    """`limit`: threads at work at one time; `hung`: calls given up that have not come back; `came_back`: those that
    have; `longest_s`: the longest time-out. `on_hung` is called at each new hung one, `on_full` with the text where a
    call has waited for a thread as long as its time-out; `remedy`: what to do where calls hang. `after_cancel_s`: what
    a call may still take whose caller has gone, None: all of its time-out. Any event loop may call, one at a time."""

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
        """Whether so many hang that no more are begun."""
        return self.hung >= self._most_hung

    def hanging(self) -> str:
        """The function that hangs most, and where it is."""
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
        """What `step()` gives, in a thread; `function` is the user's, for the errors. Its time-out counts from when it
        has a thread; `waiting` is entered while it waits for one. Raises `UserCodeError`."""
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
            call.outcome = None  # else it would live as long as the frames of the error

    def close(self) -> None:
        """Let idle threads end; those at work end with their calls."""
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
            if call.future.done():  # who asked for it is gone
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
    """The life of the thread that starts the others: `start` waits until the new thread runs, which takes long where
    many compete for the interpreter lock, and the loop must not wait for it."""
    while (wanted := starts.get()) is not None:
        wanted.jobs.put(wanted.call)
        try:
            _start(_serve, wanted.jobs)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the loop may be gone by now
                wanted.call.loop.call_soon_threadsafe(wanted.failed, wanted.call, str(error))
        del wanted


def _start(target: Callable[[Any], None], jobs: SimpleQueue[Any]) -> None:
    threading.Thread(target=target, args=(jobs,), daemon=True, name="user code").start()


def _serve(jobs: _Jobs) -> None:
    """A thread's life. While it is idle it holds nothing but its queue, so that forgotten threads can be ended."""
    pid = os.getpid()
    while (call := jobs.get()) is not None:
        call.work(pid)
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            call.loop.call_soon_threadsafe(call.came_back, jobs, call)
        del call


# None has come back for so long: this many times the longest time-out, and seconds at least.
TIMEOUTS = 4

AT_MIN_S = 60.0


class CallPool(Protocol):
    """Where calls hang. `full`: so many that no more are begun; `came_back`: how many that hung ever did; `longest_s`:
    the longest time-out; `hanging`: which functions, and where; `remedy`: what to do about it."""

    longest_s: float
    remedy: str

    @property
    def full(self) -> bool: ...
    @property
    def came_back(self) -> int: ...
    def hanging(self) -> str: ...


class ShutOff:
    """Watches sources that are full; `told` gets why user code is shut off, when it is for good."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._watched: dict[CallPool, asyncio.TimerHandle] = {}

    def look(self, source: CallPool) -> None:
        """To be called at each call that begins to hang, on the event loop."""
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
