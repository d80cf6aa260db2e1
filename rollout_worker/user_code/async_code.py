"""One event loop for async user code, in a daemon thread of its own. Nothing that runs on it ends it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from rollout_worker.user_code.daemon_executor import DaemonExecutor
from rollout_worker.user_code.errors import UserCodeError, defined_at, failure_in, file_of, name_of, place_in
from rollout_worker.user_code.forks import end_if_copy
from rollout_worker.user_code.steps import MOST_LOOKS, Sighting, blocks, code_in, cpu_clock, holds_up, sighting
from rollout_worker.user_code.values import ATOMS

# Items of an async generator that are collected.
MOST_ITEMS = 100_000

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
        self._seen.append(sighting(self._thread.ident, self._clock))
        del self._seen[:-MOST_LOOKS]
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
        if len(found) == MOST_ITEMS:
            raise ValueError(f"an async generator gave more than {MOST_ITEMS} items; give a list")
        found.append(item)
    return found
