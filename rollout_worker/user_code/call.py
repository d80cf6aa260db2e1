"""One call of user code, from the request to its end, which may be long after its time-out.

Invariant: `Call.finished` is set only when the call is not running and never will be.

Neither a thread nor a coroutine can be stopped, so a call that was given up may still use an object. The owner of the
object waits for `finished`.

A pool runs calls: `Threads`, or `Loops` for async code. If sync code returns an awaitable, its call passes from the one
to the other.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.protocol import reasons
from slipstream.rollout_worker.user_code.errors import UserCodeError, contained, defined_at, failure_in
from slipstream.rollout_worker.user_code.values import ATOMS

# Maximum number of items that are collected from an async generator.
MAX_ITEMS = 100_000


class CallPool(Protocol):
    """Runs calls that may hang.

    Attributes:
        remedy: Advice to the user if calls hang.
        longest_s: The longest time-out of any call, in seconds.
        came_back: Number of calls that have returned. It grows whenever a hung call returns.
        full: True if so many calls hang that no new calls are started.
    """

    remedy: str
    longest_s: float
    came_back: int

    @property
    def full(self) -> bool: ...

    def begin(self, call: Call) -> None:
        """Start the call as soon as possible. Raises `UserCodeError` if it cannot be started."""

    def give_up(self, call: Call) -> None:
        """Wait for the call no longer, because its time is over."""

    def left(self, call: Call) -> None:
        """Wait for the call no longer, because its caller has gone."""

    def hanging(self) -> str:
        """Describe the functions that hang, with file:line. At least one call must hang."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of user code.

    Attributes:
        function: The user's function, named in errors.
        start: Calls the function. It is dropped where it ran, so that what it holds is not freed on the caller's loop.
        plain: Turns the result into plain data. It runs where the function ran.
        timeout_s: Seconds that the call may take, counted from when it has a thread. None allows it any time.
        awaiting: The pool that awaits what the function returns. None if an awaitable is an ordinary result.
        pool: The pool that has the call now.
        loop: The caller's event loop.
        context: The caller's context variables, in which the function runs.
        future: Set on `loop` when the call has ended or is late. None once its caller knows.
        finished: Set on `loop` when the call is not running and never will be.
        wanted: False if nobody waits for the call any more. If the function was not called by then, it never is.
        began: True once the function was called.
        hung: True if the call was given up and counts as hung.
        timer: Gives the call up after its time-out. While it waits for a thread, the timer reports a long wait.
        started: Set when the wait for a thread is over. None if the call did not wait.
        waited_s: Seconds that the call waited for a thread.
        thread: Identifier of the thread that runs the call, or None before that.
        task: Task that runs the call on the event loop of user code, or None.
        pending: An awaitable that the function returned and that is not awaited yet, or None.
        outcome: The result as plain data.
        failure: The error that ended the call, or None.
    """

    function: Callable[..., Any]
    start: Callable[[], Any] | None
    plain: Callable[[Any], Any]
    timeout_s: float | None
    awaiting: CallPool | None = None
    pool: CallPool | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    future: asyncio.Future[None] | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: bool = True
    began: bool = False
    hung: bool = False
    timer: asyncio.TimerHandle | None = None
    started: asyncio.Event | None = None
    waited_s: float = 0.0
    thread: int | None = None
    task: asyncio.Task[Any] | None = None
    pending: Any = None
    outcome: Any = None
    failure: UserCodeError | None = None

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()

    async def result(self, waiting: AbstractContextManager[None] | None = None) -> Any:
        """Wait until the call has ended or is late. Await this once.

        Args:
            waiting: Context that is entered while the call waits for a thread.

        Raises:
            UserCodeError: The call failed or was late.
            NotCalled: Too many calls hang.
        """
        assert self.future is not None
        try:
            if self.started is not None:
                with waiting or nullcontext():
                    await self.started.wait()
            await self.future
            return self.outcome
        except asyncio.CancelledError:
            self.wanted = False
            if self.pool is not None and not self.finished.is_set():
                self.pool.left(self)
            raise
        finally:
            # The owner of an object keeps its last call, and with an error would keep the frames of all its callers.
            self.future = self.outcome = self.failure = None

    # What follows runs where user code runs.

    def run(self) -> None:
        """Run the call in this thread."""
        self.thread = threading.get_ident()
        if self.wanted and self.start is not None:
            self.began = True
            with contained(self._fail):
                result = self.context.run(self.start)
                if self.awaiting is not None and _is_awaited(result):
                    self.pending = result
                else:
                    self.outcome = self.plain(result)
        self.start = None

    async def run_async(self) -> None:
        """Run the call on this event loop."""
        if self.wanted and self.start is not None:
            self.began = True
            with contained(self._fail):
                result = self.start()
                self.pending = None
                while _is_awaited(result):
                    result = await (_collected(result) if inspect.isasyncgen(result) else result)
                self.outcome = self.plain(result)
        self.drop()

    def was_cancelled(self) -> None:
        """Note that other code cancelled the call before it began."""
        self.drop()
        self._fail(asyncio.CancelledError())

    def drop(self) -> None:
        """Drop the function, and close a coroutine that it gave and nobody will await: Python warns about those."""
        if inspect.iscoroutine(self.pending):
            self.pending.close()
        self.start = self.pending = None

    def _fail(self, error: BaseException) -> None:
        self.failure = failure_in(self.function, error)

    # What follows runs on the caller's loop.

    def start_timer(self, timeout_s: float | None) -> None:
        """Give the call up after `timeout_s` seconds, by this timer in place of the one before."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._too_late)

    def _too_late(self) -> None:
        assert self.pool is not None
        self.pool.give_up(self)

    def thread_ended(self) -> None:
        """End the call, whose thread has run it. If it returned an awaitable, have that awaited first."""
        if self.pending is not None and self.awaiting is not None and self.wanted:
            self.start = lambda: self.pending
            try:
                self.awaiting.begin(self)
            except UserCodeError as error:
                self.failure = error
            else:
                return
        self.drop()
        self.finish()

    def finish(self, error: UserCodeError | None = None) -> None:
        """End the call, with `error` if it could not be started."""
        self.finished.set()
        self.settle(error or self.failure)

    def settle(self, error: UserCodeError | None = None) -> None:
        """Tell the caller that the call has ended or is late, unless it was told before or has gone."""
        self.wanted = False
        if self.timer is not None:
            self.timer.cancel()
        if self.future is None or self.future.done():
            self.outcome = self.failure = None
        elif error is None:
            self.future.set_result(None)
        else:
            error.waited_s = self.waited_s
            self.future.set_exception(error)

    def late(self, more: str = "") -> UserCodeError:
        """Return the error that says that the call is late."""
        text = "nobody waits for it" if self.timeout_s is None else f"no answer within {self.timeout_s:g} s"
        return UserCodeError(text + more, reasons.TIMEOUT, defined_at(self.function))


def _is_awaited(result: Any) -> bool:
    """Tell whether a result is an awaitable or an async generator."""
    return type(result) not in ATOMS and (inspect.isawaitable(result) or inspect.isasyncgen(result))


async def _collected(items: Any) -> list[Any]:
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
