"""Runs async user code on an event loop in a daemon thread, apart from the caller's loop.

Invariant: no user code that runs on the loop can end it, and no call waits longer than its time-out.

All async code shares one event loop, so that objects bound to a loop (a session, a lock) work from call to call. While
a function blocks that loop, calls that have not started go to a spare loop, and an alarm names the function. When the
function returns control, the first loop is used again. All decisions are made on the caller's event loop.

A loop can be slow without being blocked, because the machine is starved. Then many steps each take long, none of them
is to blame, and the loop keeps its calls.

`DaemonExecutor` provides the threads for `asyncio.to_thread` and `loop.run_in_executor(None, ...)` in async user code.
asyncio's own executor has few threads, never replaces one that hangs, and keeps the process from ending. Here, when a
coroutine is given up, its job counts in `hung` until it returns, and another thread takes its place. The threads are
daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeAlias

from protocol import reasons
from rollout_worker.user_code.errors import (
    NotCalled,
    UserCodeError,
    defined_at,
    end_if_copy,
    failure_in,
    file_of,
    name_of,
    place_in,
)
from rollout_worker.user_code.threads import HUNG_PER_THREAD
from rollout_worker.user_code.values import ATOMS, encodable

_Jobs: TypeAlias = "SimpleQueue[_Job | None]"


class _Job(Future[Any]):
    def __init__(self, work: Callable[[], Any], abandoned: Callable[[_Job], None]) -> None:
        super().__init__()
        self.work: Callable[[], Any] | None = work
        self.at_work = False
        self.hung = False
        self._abandoned = abandoned

    def cancel(self) -> bool:
        """Cancel the job. asyncio calls this when the task that awaits the job is cancelled.

        A running job cannot be cancelled. It continues, and nobody waits for it.

        Returns:
            True if the job was cancelled, False if it continues.
        """
        cancelled = super().cancel()
        if not cancelled:
            self._abandoned(self)
        return cancelled


class DaemonExecutor(ThreadPoolExecutor):
    """Runs jobs in daemon threads and replaces a thread whose job hangs.

    Any thread may submit. The base class is `ThreadPoolExecutor` because asyncio accepts no other.

    Args:
        limit: Maximum number of jobs that run at once, hung ones not counted.
        on_hung: Called in any thread each time a job starts to count as hung.

    Attributes:
        hung: Number of jobs that were given up and are still running.
    """

    def __init__(self, limit: int, on_hung: Callable[[], None] = lambda: None) -> None:
        super().__init__(limit)  # It starts no thread: only its own `submit` does, which is replaced here.
        self.hung = 0
        self._limit = limit
        self._on_hung = on_hung
        self._lock = threading.Lock()
        self._closed = False
        self._busy = 0
        self._free: list[_Jobs] = []
        self._waiting: deque[_Job] = deque()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Run `function` in a thread as soon as one is free.

        Raises:
            RuntimeError: Too many jobs hang, or the machine provides no more threads.
        """
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
        """Do nothing, because event loops call this when they close, and they do not own the executor. See `close`."""

    def close(self) -> None:
        """End idle threads. Busy threads end when their jobs do."""
        with self._lock:
            self._closed = True
            while self._free:
                self._free.pop().put(None)

    def _begin(self, job: _Job) -> None:
        """Start the job in an idle thread or a new one. The caller holds the lock."""
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
        """Record that a job ended and give its thread the next one.

        Args:
            job: The job that ended.
            jobs: Queue of the thread that ran it, which is free now.
        """
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
            except RuntimeError as error:  # The machine provides no more threads.
                if job.set_running_or_notify_cancel():
                    job.set_exception(error)


def _serve(jobs: _Jobs, executor: DaemonExecutor, pid: int) -> None:
    """Run jobs in this thread until it receives None. `pid` is the process that started the thread."""
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


# A step is to blame if it waited or computed at this many looks while the loop did not respond. The unit is looks and
# not seconds, because a process that was stopped for a while has blocked nothing.
LOOKS = 8

# After this many looks a step is to blame in any case, because it may wait in many places (a loop of short sleeps).
MAX_LOOKS = 16 * LOOKS

# Fractions of the time between looks. A thread that computes uses more CPU time than the first, and a thread that waits
# uses less than the second. A thread that wants to compute but gets no CPU is between them.
_COMPUTES, _WAITS = 0.5, 0.01


@dataclass(frozen=True, slots=True)
class Sighting:
    """Records what a loop's thread was doing at one moment.

    Attributes:
        step: The callback that the loop was running, or None if none was seen. It is the same object for as long as the
            callback runs.
        place: The instruction that the thread was at.
        cpu_s: CPU time that the thread had used, in seconds.
    """

    step: object | None
    place: object
    cpu_s: float


def sample_stack(thread: int | None, clock: int | None) -> Sighting:
    """Look once at what a thread is doing.

    Args:
        thread: Identifier of the thread.
        clock: Clock of the thread's CPU time, from `cpu_clock`, or None if the system has none.
    """
    frame = innermost = sys._current_frames().get(thread or 0)
    while frame is not None and not _is_a_step(frame):
        frame = frame.f_back
    place = None if innermost is None else (innermost.f_code, innermost.f_lasti)
    return Sighting(frame, place, _cpu_s(clock))


def code_in(thread: int | None, files: Set[str | None]) -> tuple[str, str] | None:
    """Find the code that the current step of a thread runs.

    Args:
        thread: Identifier of the thread.
        files: Files whose code is preferred: the outermost frame in one of them is reported, if there is any.

    Returns:
        The name and file:line of the code, or None if the thread runs no step.
    """
    found: FrameType | None = None
    frame = sys._current_frames().get(thread or 0)
    outermost = frame
    while frame is not None and not _is_a_step(frame):
        outermost = frame
        found = frame if frame.f_code.co_filename in files else found
        frame = frame.f_back
    found = found or outermost
    if frame is None or found is None:
        return None
    return encodable(found.f_code.co_qualname), encodable(f"{found.f_code.co_filename}:{found.f_lineno}")


def cpu_clock(thread: int) -> int | None:
    """Return the clock of a running thread's CPU time, or None if the system has none (macOS).

    The clock may still be read after the thread has ended.
    """
    made = getattr(time, "pthread_getcpuclockid", None)
    return None if made is None else made(thread)


def blocks(seen: Sequence[Sighting], look_s: float) -> bool:
    """Decide whether the step seen last blocks its loop, so that calls should go to another loop.

    Args:
        seen: Sightings of a loop that does not respond, oldest first.
        look_s: Seconds between two sightings.
    """
    looks = 0
    for each in reversed(seen):
        if each.step is not seen[-1].step:
            break
        looks += 1
    if looks < LOOKS or looks >= MAX_LOOKS:
        return looks >= MAX_LOOKS
    same = seen[-looks:]
    computes = same[-1].cpu_s - same[0].cpu_s >= _COMPUTES * LOOKS * look_s
    return same[-1].step is not None and (computes or _waits(same[-LOOKS:], look_s) == LOOKS - 1)


def holds_up(seen: Sequence[Sighting], look_s: float) -> bool:
    """Decide whether the step seen last is to blame that the loop does not respond.

    It is to blame if it blocks the loop, or if it is one of many steps that each wait for a while where they should
    await.

    Args:
        seen: Sightings as for `blocks`.
        look_s: Seconds between two sightings.
    """
    waits_now = _waits(seen[-2:], look_s) == 1
    return blocks(seen, look_s) or (waits_now and _waits(seen, look_s) >= LOOKS - 1)


def _waits(seen: Sequence[Sighting], look_s: float) -> int:
    """Count consecutive sightings of one step at the same instruction that used no CPU between them."""
    return sum(
        one.step is not None
        and one.step is other.step
        and one.place == other.place
        and other.cpu_s - one.cpu_s <= _WAITS * look_s
        for one, other in pairwise(seen)
    )


def _is_a_step(frame: FrameType) -> bool:
    return frame.f_code is asyncio.Handle._run.__code__


def _cpu_s(clock: int | None) -> float:
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError:  # The thread has ended.
        return 0.0


# Maximum number of items that are collected from an async generator.
MAX_ITEMS = 100_000

_CLOSE_S = 1.0


class Awaited(ABC):
    """An awaitable that is informed if nobody is going to await it."""

    @abstractmethod
    def __await__(self) -> Generator[Any, Any, Any]: ...

    @abstractmethod
    def close(self) -> None:
        """Release the awaitable. Called at most once, in any thread, and only if it is never awaited."""


class PendingValue:
    """Carries a user's value from thread to thread.

    The value is taken out in the thread that uses it, and therefore freed there. A coroutine is closed if it is never
    taken out, for example because its caller has gone in the meantime.

    Attributes:
        began: Monotonic time in seconds when the call that returned the value began.
    """

    def __init__(self, value: Any, began: float = 0.0) -> None:
        self.began = began
        self._values = [value]

    def take(self) -> Any:
        return self._values.pop()

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            close_unawaited(self._values.pop())

    def __del__(self) -> None:
        self.close()


def close_unawaited(value: Any) -> None:
    """Close `value` if it is a coroutine that has not started, or an `Awaited`. Ignore any other value.

    Python warns about a coroutine that is dropped without being awaited or closed. No user code runs when a coroutine
    is closed before it started.
    """
    if inspect.iscoroutine(value):
        waits = inspect.getcoroutinestate(value) == inspect.CORO_CREATED
    else:
        waits = isinstance(value, Awaited)
    if waits:
        value.close()


@dataclass(slots=True, eq=False)
class AsyncCall:
    """One call of async user code.

    Attributes:
        loop: The caller's event loop.
        future: Set on `loop` when the call has ended or is late.
        function: The user's function, named in errors.
        start: Makes the awaitable or the async generator. None once it was called.
        plain: Turns the result into plain data.
        came_back: Called on `loop` when the coroutine has ended.
        only: One entry. A call may be offered to several loops, and the loop that takes the entry runs it.
        home: The loop that runs the call, or None before it starts.
        task: The running task on `home`, or None.
        given_up: True if nobody waits for the call any more.
        hung: True if the call was given up and counts as hung.
        ended: True if the coroutine has ended.
        outcome: `plain` of the result if it is a simple value, otherwise the result in a `PendingValue`.
        error: The failure of the call, or None.
    """

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    function: Callable[..., Any]
    start: Callable[[], Any] | None
    plain: Callable[[Any], Any]
    came_back: Callable[[AsyncCall], None]
    only: list[None] = field(default_factory=lambda: [None])
    home: EventLoop | None = None
    task: asyncio.Task[Any] | None = None
    given_up: bool = False
    hung: bool = False
    ended: bool = False
    outcome: Any = None
    error: UserCodeError | None = None

    async def run(self, pid: int) -> None:
        """Run the call on the loop of user code, and record its outcome or error.

        Every exception is caught, because asyncio lets a SystemExit or KeyboardInterrupt end the whole loop.

        Args:
            pid: The worker's process. A copy made with `os.fork` ends here.
        """
        assert self.start is not None
        try:
            result = self.start()
            self.start = None
            if inspect.isasyncgen(result):
                result = await collected(result)
            while inspect.isawaitable(result):
                result = await result
            self.outcome = self.plain(result) if type(result) in ATOMS else PendingValue(result)
            end_if_copy(pid)
        except asyncio.CancelledError as error:
            end_if_copy(pid, error)
            self.error = UserCodeError("it cancelled itself", "CancelledError", defined_at(self.function))
        except BaseException as error:
            end_if_copy(pid, error)
            self.error = failure_in(self.function, error)


@dataclass(frozen=True, slots=True)
class Culprit:
    """The code that occupies an event loop.

    Attributes:
        name: Name of the code.
        where: The file:line that it is at, or None if unknown.
        function: The user function that was called, or None if the code runs in a task that a user function started.
    """

    name: str
    where: str | None
    function: Callable[..., Any] | None = None


class EventLoop:
    """An event loop for user code, with its thread. Public methods are for the caller's thread.

    Args:
        executor: Runs the jobs that user code puts in threads.
        look_s: Seconds between two looks at the loop.

    Attributes:
        held_up: True if code on the loop waits where it should await.
        blocked: True if code on the loop does not return control at all.
        told: True once the caller was alerted to the code that holds up the loop.
    """

    def __init__(self, executor: DaemonExecutor, look_s: float) -> None:
        self.blocked = self.held_up = self.told = False
        self._look_s = look_s
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(executor)
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[asyncio.Task[Any], AsyncCall] = {}
        self._closing = False
        self._pid = os.getpid()
        # Needs no lock: the caller's thread writes one of the two, and the loop's thread the other.
        self._asked = self._answered = 0
        self._seen: list[Sighting] = []
        self._clock: int | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name="async user code")
        self._thread.start()

    def look(self) -> None:
        """Ask the loop to respond. If it has not responded to the last look, record what it is doing."""
        if self._answered == self._asked:
            self.blocked = self.held_up = self.told = False
            self._seen.clear()
            self._asked += 1
            self._soon(self._answer, self._asked)
            return
        self._seen.append(sample_stack(self._thread.ident, self._clock))
        del self._seen[:-MAX_LOOKS]
        self.blocked = self.blocked or blocks(self._seen, self._look_s)
        self.held_up = self.held_up or holds_up(self._seen, self._look_s)

    def begin(self, call: AsyncCall) -> None:
        """Run the call, unless another loop has started it by then."""
        self._soon(self._start, call)

    def cancel(self, call: AsyncCall) -> None:
        """Cancel the coroutine, as soon as the loop can."""
        self._soon(self._cancel, call)

    def culprit(self) -> Culprit | None:
        """Return the user code that runs at this moment, or None if none does."""
        task = asyncio.current_task(self._loop)
        if task is None:
            return None
        call = self._calls.get(task)
        if call is not None:
            return Culprit(name_of(call.function), place_in(call.function, self._thread.ident), call.function)
        files = {file_of(other.function) for other in list(self._calls.values())}
        found = code_in(self._thread.ident, files)  # The task is not a call: user code started it.
        return None if found is None else Culprit(*found)

    def close(self) -> None:
        """Cancel running calls and end the loop. Code that blocks the loop ends with the process."""
        self._soon(self._end)

    def _soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(callback, *arguments)

    # The methods below run in the loop's own thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._clock = cpu_clock(threading.get_ident())
        while not self._closing:
            # A SystemExit in a task that user code started ends run_forever. So does a call of loop.stop().
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
            end_if_copy(self._pid)
        with contextlib.suppress(BaseException):
            self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        """Cancel all tasks, wait for them for at most `_CLOSE_S` seconds, and close async generators."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        await self._loop.shutdown_asyncgens()

    def _end(self) -> None:
        self._closing = True
        self._loop.stop()

    def _answer(self, number: int) -> None:
        self._answered = number

    def _start(self, call: AsyncCall) -> None:
        task = self._loop.create_task(self._run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, call: AsyncCall) -> None:
        try:
            call.only.pop()
        except IndexError:
            return
        call.home, call.task = self, asyncio.current_task()
        assert call.task is not None
        self._calls[call.task] = call
        try:
            if not call.given_up:
                await call.run(self._pid)
        finally:
            del self._calls[call.task]
            # A call that was not started is freed here. Otherwise it would live as long as the error's frames.
            call.task = call.start = None
            self._ended(call)

    def _cancel(self, call: AsyncCall) -> None:
        if call.task is not None:
            call.task.cancel()

    def _ended(self, call: AsyncCall) -> None:
        with contextlib.suppress(RuntimeError):  # The caller's loop may be closed by now.
            call.loop.call_soon_threadsafe(call.came_back, call)


async def collected(items: Any) -> list[Any]:
    """Return the items of an async generator as a list.

    Raises:
        ValueError: The generator gives more than `MAX_ITEMS` items.
    """
    found: list[Any] = []
    async for item in items:
        if len(found) == MAX_ITEMS:
            raise ValueError(f"an async generator gave more than {MAX_ITEMS} items; give a list")
        found.append(item)
    return found


MAX_LOOPS = 4


@dataclass(eq=False)
class Loops:
    """Runs async calls on one event loop, and on spare ones while that loop is blocked.

    Attributes:
        threads: Maximum number of jobs of async code that run in threads at once.
        on_hung: Called each time a call, or a job in a thread, starts to count as hung.
        on_blocked: Called with the name of a function that blocks its loop, and the file:line that it is at.
        look_s: Seconds between two looks at a loop. Looks decide whether it is blocked (see `blocks`). A coroutine
            counts as hung if it is still running `LOOKS` looks after it was cancelled.
        remedy: Advice to the user if calls hang.
        hung: Number of calls that were given up and are still running.
        came_back: Number of calls that have ended, hung or not.
        longest_s: The longest time-out of any call, in seconds.
    """

    threads: int = 64
    on_hung: Callable[[], None] = lambda: None
    on_blocked: Callable[[str, str | None], None] = lambda name, where: None
    look_s: float = 0.25
    remedy: str = "mend what hangs"
    hung: int = 0
    came_back: int = 0
    longest_s: float = 0.0
    _loops: list[EventLoop] = field(default_factory=list)
    _in_flight: set[AsyncCall] = field(default_factory=set)
    _watch: asyncio.TimerHandle | None = None
    _caller: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self._executor = DaemonExecutor(self.threads, self._a_job_hangs)

    @property
    def all_hung(self) -> int:
        """Number of hung calls, plus hung jobs of async code in threads."""
        return self.hung + self._executor.hung

    @property
    def full(self) -> bool:
        """True if there are `MAX_LOOPS` loops and every one is blocked."""
        return len(self._loops) == MAX_LOOPS and all(loop.blocked for loop in self._loops)

    def hanging(self) -> str:
        """Describe the functions that block the loops, with file:line."""
        culprits = [culprit for loop in self._loops if (culprit := loop.culprit()) is not None]
        told = dict.fromkeys(f"{culprit.name} ({culprit.where})" for culprit in culprits)
        return f"all {MAX_LOOPS} event loops of async code are blocked, by {', '.join(told) or 'code that has ended'}"

    async def run(
        self,
        function: Callable[..., Any],
        start: Callable[[], Any],
        plain: Callable[[Any], Any],
        timeout_s: float,
        told_s: float | None = None,
    ) -> Any:
        """Call `start` on a loop of user code and await its result. An async generator is collected into a list.

        Args:
            function: The user's function, named in errors.
            start: Makes the awaitable or the async generator.
            plain: Turns the result into plain data.
            timeout_s: Seconds that the call may take.
            told_s: The time-out as the user set it, in seconds, if part of it is already spent. Errors name it.

        Returns:
            `plain(result)` if the result is a simple value. Otherwise the result in a `PendingValue`, because `plain`
            may block on it.

        Raises:
            UserCodeError: The call failed or was late.
            NotCalled: Every event loop is blocked.
        """
        self.longest_s = max(self.longest_s, told_s or timeout_s)
        home = self._responsive()
        if home is None:
            text = f"not called: all {MAX_LOOPS} event loops are blocked; await in async code, or write it as plain def"
            raise NotCalled(text, reasons.TIMEOUT, defined_at(function))
        self._caller = loop = asyncio.get_running_loop()
        call = AsyncCall(loop, loop.create_future(), function, start, plain, self._came_back)
        self._in_flight.add(call)
        if self._watch is None:
            self._watch = loop.call_later(self.look_s, self._look, loop)
        home.begin(call)
        timer = loop.call_later(timeout_s, self._too_late, call, told_s or timeout_s)
        try:
            await call.future
        finally:
            timer.cancel()
            if not call.ended:
                self._give_up(call)
        if call.error is not None:
            raise call.error
        return call.outcome

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        while self._loops:
            self._loops.pop().close()
        self._executor.close()

    def __del__(self) -> None:
        self.close()

    def _responsive(self) -> EventLoop | None:
        """Return the first loop that is not blocked.

        If all are blocked, return a new loop, or None if there are `MAX_LOOPS` already.
        """
        found = next((loop for loop in self._loops if not loop.blocked), None)
        if found is None and len(self._loops) < MAX_LOOPS:
            found = EventLoop(self._executor, self.look_s)
            self._loops.append(found)
        return found

    def _came_back(self, call: AsyncCall) -> None:
        call.ended = True
        self.came_back += 1
        self._in_flight.discard(call)
        self.hung -= call.hung
        if not call.future.done():
            call.future.set_result(None)

    def _too_late(self, call: AsyncCall, timeout_s: float) -> None:
        text = f"no answer within {timeout_s:g} s"
        culprit = call.home.culprit() if call.home is not None and call.home.blocked else None
        if culprit is not None and culprit.function is not call.function:
            text += f": {culprit.name} blocked its event loop at {culprit.where}"
        if not call.future.done():
            error = UserCodeError(text, reasons.TIMEOUT, defined_at(call.function))
            call.future.set_exception(error)

    def _give_up(self, call: AsyncCall) -> None:
        call.given_up = True
        if call.home is not None:
            call.home.cancel(call)
        call.loop.call_later(self.look_s * LOOKS, self._count_if_hung, call)

    def _count_if_hung(self, call: AsyncCall) -> None:
        if not call.ended:
            call.hung = True
            self.hung += 1
            self.on_hung()

    def _a_job_hangs(self) -> None:
        with contextlib.suppress(RuntimeError):  # The caller's loop may be closed by now.
            if self._caller is not None:
                self._caller.call_soon_threadsafe(self.on_hung)

    def _look(self, caller: asyncio.AbstractEventLoop) -> None:
        """Look at each loop, and repeat this while there are calls. Alert the user once to each block."""
        self._watch = None
        for loop in list(self._loops):
            could = not loop.blocked
            loop.look()
            if loop.held_up and not loop.told:
                loop.told = True
                if (culprit := loop.culprit()) is not None:
                    self.on_blocked(culprit.name, culprit.where)
            if loop.blocked and could:
                self._move_on()
        if self._in_flight:
            self._watch = caller.call_later(self.look_s, partial(self._look, caller))

    def _move_on(self) -> None:
        """Offer the calls that no loop has started to a loop that responds."""
        home = self._responsive()
        for call in self._in_flight:
            if home is not None and call.home is None:
                home.begin(call)
