"""One event loop for async user code, in a daemon thread of its own. Nothing that runs on it ends it.

The threads of `asyncio.to_thread` and `loop.run_in_executor(None, ...)` in async user code.

asyncio's own executor has few threads, gives none back that hangs, and keeps the process from ending. Here a job that
nobody waits for any more, because its coroutine was given up, is counted in `hung` until it comes back, and another
thread takes its place. The threads are daemons.

Which step of an event loop blocks it. A loop may also be slow because the machine is starved: then each of many
steps takes long, and none of them is to blame.

Where async user code runs, and what becomes of a call that is late or blocks the others.

All async code shares one event loop, so that what is bound to a loop (a session, a lock) works from call to call. While
a function blocks that loop, calls that have not begun go to a spare one, and an alarm names the function; once it lets
go, the first loop is used again. A loop that is only slow keeps its calls. Decisions are taken on the event loop of the
caller.
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


# Looks without a sign of life at which something waited or computed, after which it is to blame. Looks, not seconds: a
# process that was stopped for a while has blocked nothing.
LOOKS = 8

# Looks at one step after which it is to blame in any case: it waits in many places (a loop of short sleeps).
MAX_LOOKS = 16 * LOOKS

# Of the time between looks: the CPU time of a thread that computes is above the one, of one that waits below the other.
# One that wants to compute and has no CPU is between them.
_COMPUTES, _WAITS = 0.5, 0.01


@dataclass(frozen=True, slots=True)
class Sighting:
    """A loop's thread at one moment. `step`: the callback that it runs, the same object for as long as it does; None
    if it is not seen; `place`: the instruction that it is at; `cpu_s`: seconds of CPU time that the thread has used."""

    step: object | None
    place: object
    cpu_s: float


def sample_stack(thread: int | None, clock: int | None) -> Sighting:
    """Of the thread of that number. clock: of its CPU time; None where there is none."""
    frame = innermost = sys._current_frames().get(thread or 0)
    while frame is not None and not _is_a_step(frame):
        frame = frame.f_back
    place = None if innermost is None else (innermost.f_code, innermost.f_lasti)
    return Sighting(frame, place, _cpu_s(clock))


def code_in(thread: int | None, files: Set[str | None]) -> tuple[str, str] | None:
    """Name and file:line of what the step of that thread runs: in one of `files`, if it is there."""
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
    """The clock of a running thread's CPU time; None where the system has none (macOS). Once the thread has ended it
    can still be asked."""
    made = getattr(time, "pthread_getcpuclockid", None)
    return None if made is None else made(thread)


def blocks(seen: Sequence[Sighting], look_s: float) -> bool:
    """Whether the step seen last blocks its loop: calls had better go elsewhere. seen: at looks `look_s` seconds apart
    at a loop that gives no sign of life, oldest first."""
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
    """Whether the step seen last is to blame that there is no sign of life: it blocks the loop, or is one of many that
    each wait for a while where they should await. seen: as of `blocks`."""
    waits_now = _waits(seen[-2:], look_s) == 1
    return blocks(seen, look_s) or (waits_now and _waits(seen, look_s) >= LOOKS - 1)


def _waits(seen: Sequence[Sighting], look_s: float) -> int:
    """How often one step was at the same instruction at two looks, and used no CPU between them."""
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
    except OSError:  # the thread has ended
        return 0.0


# Items of an async generator that are collected.
MAX_ITEMS = 100_000

_CLOSE_S = 1.0


class Awaited(ABC):
    """What has to be awaited, and is told where nobody will."""

    @abstractmethod
    def __await__(self) -> Generator[Any, Any, Any]: ...

    @abstractmethod
    def close(self) -> None:
        """Called at most once, in any thread, in place of awaiting it."""


class PendingValue:
    """A value of the user's on its way from thread to thread: it is taken out where it is used, and so freed there.
    A coroutine that is never taken out, as its caller has gone meanwhile, is closed. `began`: when the call that gave
    it did, in seconds, monotonic."""

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
    """A coroutine that has not begun, and now never will: nothing of the user's runs in its close, and Python warns of
    one that is dropped without."""
    if inspect.iscoroutine(value):
        waits = inspect.getcoroutinestate(value) == inspect.CORO_CREATED
    else:
        waits = isinstance(value, Awaited)
    if waits:
        value.close()


@dataclass(slots=True, eq=False)
class AsyncCall:
    """A call of async code. start: makes the awaitable, or the async generator; plain: what the result becomes.

    `outcome`: the plain result of a simple value, else the value itself, `Held`; `error`: what went wrong. `came_back`
    is called on the caller's `loop` when the coroutine has ended. `home`: the loop that has begun it; it may be offered
    to several, and the one that takes its `only` entry does.
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
        """On the loop of user code, in the process `pid`. asyncio lets a SystemExit or KeyboardInterrupt end the whole
        loop."""
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
    """`name`: of what runs; `where`: the file:line that it is at; `function`: the one that was called, None for code in
    a task that it began."""

    name: str
    where: str | None
    function: Callable[..., Any] | None = None


class EventLoop:
    """The loop and its thread. Methods are for the caller's thread. `executor`: for what the user's code runs in
    threads; `look_s`: seconds between two looks at it. `held_up`: whether what runs on it waits where it should
    await; `blocked`: whether it does not let go at all."""

    def __init__(self, executor: DaemonExecutor, look_s: float) -> None:
        self.blocked = self.held_up = self.told = False
        self._look_s = look_s
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(executor)
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[asyncio.Task[Any], AsyncCall] = {}
        self._closing = False
        self._pid = os.getpid()
        # Each is written by one thread only.
        self._asked = self._answered = 0
        self._seen: list[Sighting] = []
        self._clock: int | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name="async user code")
        self._thread.start()

    def look(self) -> None:
        """Ask for a sign of life; where none has come, see what the loop is at."""
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
        """Run it, unless another loop has begun it by then."""
        self._soon(self._start, call)

    def cancel(self, call: AsyncCall) -> None:
        """Cancel the coroutine, as soon as the loop can."""
        self._soon(self._cancel, call)

    def culprit(self) -> Culprit | None:
        """What runs at this moment; None if nothing of the user's does."""
        task = asyncio.current_task(self._loop)
        if task is None:
            return None
        call = self._calls.get(task)
        if call is not None:
            return Culprit(name_of(call.function), place_in(call.function, self._thread.ident), call.function)
        files = {file_of(other.function) for other in list(self._calls.values())}
        found = code_in(self._thread.ident, files)  # of a task that the user's code began
        return None if found is None else Culprit(*found)

    def close(self) -> None:
        """Cancel what runs, and end; what blocks it ends with the process."""
        self._soon(self._end)

    def _soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    # What follows runs in the loop's own thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._clock = cpu_clock(threading.get_ident())
        while not self._closing:
            # A SystemExit in a task that the user's code began ends run_forever, and so does its loop.stop().
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
            end_if_copy(self._pid)
        with contextlib.suppress(BaseException):
            self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
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
            call.task = call.start = None  # what was not begun is freed here, and not with the error's frames
            self._ended(call)

    def _cancel(self, call: AsyncCall) -> None:
        if call.task is not None:
            call.task.cancel()

    def _ended(self, call: AsyncCall) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop may be gone by now
            call.loop.call_soon_threadsafe(call.came_back, call)


async def collected(items: Any) -> list[Any]:
    """The items of an async generator. Raises `ValueError` where they do not end."""
    found: list[Any] = []
    async for item in items:
        if len(found) == MAX_ITEMS:
            raise ValueError(f"an async generator gave more than {MAX_ITEMS} items; give a list")
        found.append(item)
    return found


MAX_LOOPS = 4


@dataclass(eq=False)
class Loops:
    """`threads`: the most jobs of async code in threads at one time. `hung`: calls given up that have not come back;
    `came_back`: calls that have ended, hung or not; `longest_s`: the longest time-out. `on_hung` is called at each new
    hung one, and at each job that hangs in a thread. `on_blocked` gets the name of a function that blocks its loop, and
    the file:line that it is at. `look_s`: seconds between two looks at a loop, which tell whether it is blocked (see
    `steps`); `LOOKS` of them after its cancellation, a coroutine is hung. `remedy`: what to do where calls hang."""

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
        """`hung`, and jobs in threads that nobody waits for any more."""
        return self.hung + self._executor.hung

    @property
    def full(self) -> bool:
        """Whether every loop is blocked."""
        return len(self._loops) == MAX_LOOPS and all(loop.blocked for loop in self._loops)

    def hanging(self) -> str:
        """The functions that block the loops, and where."""
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
        """`plain` of what `start()` gives, awaited, or collected where it is an async generator; `Held`, where it is
        not a simple value, as `plain` may block then. `function` is the user's, for the errors; `told_s`: the
        time-out as it was set, where a part of it is spent. Raises `UserCodeError`."""
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
        """The first loop that is not blocked; a new one where all are; None where there are enough."""
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
        with contextlib.suppress(RuntimeError):  # the caller's loop may be gone by now
            if self._caller is not None:
                self._caller.call_soon_threadsafe(self.on_hung)

    def _look(self, caller: asyncio.AbstractEventLoop) -> None:
        """At each loop, while there are calls; a blocked one is told once."""
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
        """Calls that no loop has begun go to one that can."""
        home = self._responsive()
        for call in self._in_flight:
            if home is not None and call.home is None:
                home.begin(call)
