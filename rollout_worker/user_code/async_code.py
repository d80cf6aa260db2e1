"""Runs async user code on an event loop in a daemon thread, apart from the caller's loop.

Invariant: no user code that runs on the loop can end it, and no call waits longer than its time-out.

All async code shares one event loop, so that objects bound to a loop (a session, a lock) work from call to call. The
loop is pinged each second. After `MAX_UNANSWERED` pings without an answer it counts as blocked: a sample of its stack
names the culprit, and new calls go to another loop until it answers again. Those with much time, as of agents, wait for
it up to `MAX_PATIENCE` pings first, since what is bound to a loop fails on another. Calls on a blocked loop stay there.
A machine that has no time for the loop has none for the caller's either, so a ping does not count while the caller's
own loop is late. All decisions are made on the caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from slipstream.protocol import reasons
from slipstream.rollout_worker.user_code.call import Call
from slipstream.rollout_worker.user_code.errors import NotCalled, defined_at, file_of, name_of
from slipstream.rollout_worker.user_code.threads import ThreadExecutor, Threads, no_thread
from slipstream.rollout_worker.user_code.values import encodable

MAX_LOOPS = 4

MAX_UNANSWERED = 10

# Pings for which a call waits for a blocked loop before it goes to another: a tenth of its seconds, up to this.
MAX_PATIENCE = 60

# A cancelled coroutine, or a job that nobody waits for any more, counts as hung if it runs on for so many pings.
_PINGS_TO_END = 2

# Seconds that the last coroutines may take to end when a loop is closed.
_CLOSE_S = 1.0


class Culprit(NamedTuple):
    """The code that occupies an event loop: its name, and the file:line that it is at."""

    name: str
    where: str


class EventLoop:
    """An event loop for user code, with its thread. Public methods are for the caller's thread.

    Args:
        executor: Runs the jobs that user code puts in threads.

    Attributes:
        told: True once the caller was told of the code that blocks the loop.
    """

    def __init__(self, executor: ThreadExecutor) -> None:
        self.told = False
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_default_executor(executor)
        self._calls: dict[asyncio.Task[Any], Call] = {}
        self._closing = False
        # Needs no lock: the caller's thread writes one of the two, and the loop's thread the other.
        self._asked = self._answered = 0
        self._unanswered = 0
        self._thread = threading.Thread(target=self._serve, daemon=True, name="async user code")
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    @property
    def blocked(self) -> bool:
        """True if code on the loop does not return control."""
        return self.unanswered >= MAX_UNANSWERED

    @property
    def unanswered(self) -> int:
        """Number of pings for which code on the loop has not returned control."""
        return self._unanswered if self._answered != self._asked else 0

    def ping(self, counts: bool) -> None:
        """Ask the loop to respond. If it has not responded to the last ping, count that if it `counts`."""
        if self._answered == self._asked:
            self._unanswered, self.told = 0, False
            self._asked += 1
            self._soon(self._answer, self._asked)
        elif counts:
            self._unanswered += 1

    def begin(self, call: Call, came_back: Callable[[Call], None]) -> None:
        """Run the call. `came_back` is called on the caller's loop when it has ended."""
        self._soon(self._start, call, came_back)

    def cancel(self, call: Call) -> None:
        """Cancel the coroutine, as soon as the loop can."""
        self._soon(self._cancel, call)

    def culprit(self) -> Culprit | None:
        """Return the user code that runs at this moment, or None if none does."""
        frames = []
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
            frames.append(frame)
            frame = frame.f_back
        if frame is None:  # The loop is between two callbacks.
            return None
        files = {file_of(call.function) for call in list(self._calls.values())}
        ours = [each for each in frames if each.f_code.co_filename in files] or frames
        if ours[-1].f_code.co_filename == __file__:
            return None
        code = ours[0].f_code
        return Culprit(encodable(code.co_qualname), encodable(f"{code.co_filename}:{ours[0].f_lineno}"))

    def close(self) -> None:
        """Cancel running calls and end the loop. Code that blocks the loop ends with the process."""
        self._soon(self._end)

    def _soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(callback, *arguments)

    # The methods below run in the loop's own thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not (self._closing or self._loop.is_closed()):
            # A SystemExit in a task that user code started ends run_forever. So does a call of loop.stop().
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
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

    def _start(self, call: Call, came_back: Callable[[Call], None]) -> None:
        call.task = self._loop.create_task(call.run_async(), context=call.context)
        self._calls[call.task] = call
        # Not at the end of the coroutine: one that other code cancels before its first step never runs.
        call.task.add_done_callback(partial(self._ended, call, came_back))

    def _ended(self, call: Call, came_back: Callable[[Call], None], task: asyncio.Task[None]) -> None:
        del self._calls[task]
        call.task = None
        if task.cancelled():
            call.was_cancelled()
        with contextlib.suppress(RuntimeError):  # The caller's loop may be closed by now.
            call.loop.call_soon_threadsafe(came_back, call)

    def _cancel(self, call: Call) -> None:
        if call.task is not None:  # Otherwise it has ended, or finds that it is not wanted any more.
            call.task.cancel()


class Loops:
    """Runs async calls on one event loop, and on spare ones while that loop is blocked. It is a `CallPool`.

    Args:
        threads: Runs the jobs that async code puts in threads.
        on_hung: Called each time a call starts to count as hung.
        on_blocked: Called with the code that blocks a loop, or None if that was not seen, when a loop gets blocked.
        remedy: Advice to the user if calls hang.
        ping_s: Seconds between two pings.

    Attributes:
        hung: Number of calls that were given up and are still running.
    """

    def __init__(
        self,
        threads: Threads,
        on_hung: Callable[[], None],
        on_blocked: Callable[[Culprit | None], None],
        remedy: str,
        ping_s: float,
    ) -> None:
        self.remedy = remedy
        self.hung = 0
        self.came_back = 0
        self.longest_s = 0.0
        self._threads = threads
        self._on_hung = on_hung
        self._on_blocked = on_blocked
        self._ping_s = ping_s
        self._executor: ThreadExecutor | None = None
        self._loops: list[EventLoop] = []
        self._homes: dict[Call, EventLoop] = {}
        self._caller: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        return len(self._loops) == MAX_LOOPS and all(loop.blocked for loop in self._loops)

    def hanging(self) -> str:
        """Describe the functions that block the loops, with file:line."""
        culprits = [culprit for loop in self._loops if (culprit := loop.culprit()) is not None]
        told = dict.fromkeys(f"{culprit.name} ({culprit.where})" for culprit in culprits)
        return f"all {MAX_LOOPS} event loops of async code are blocked, by {', '.join(told) or 'code that has ended'}"

    def begin(self, call: Call) -> None:
        """Run the call on the first loop that is not blocked, or not for long, or on a new one.

        Raises:
            NotCalled: There are `MAX_LOOPS` loops, and every one is blocked.
            UserCodeError: The machine provides no more threads or files.
        """
        if self._executor is None:
            self._executor = ThreadExecutor(self._threads, _PINGS_TO_END * self._ping_s)
        self._executor.caller = call.loop
        patience = max(MAX_UNANSWERED, min(MAX_PATIENCE, (call.timeout_s or 0.0) / 10))
        home = next((loop for loop in self._loops if loop.unanswered < patience), None)
        if home is None:
            if len(self._loops) == MAX_LOOPS:
                text = f"not called: all {MAX_LOOPS} event loops are blocked; await in async code, or write it as def"
                raise NotCalled(text, reasons.TIMEOUT, defined_at(call.function))
            try:
                home = EventLoop(self._executor)
            except (RuntimeError, OSError) as error:
                raise no_thread(call, error) from None
            self._loops.append(home)
        call.pool = self
        self._homes[call] = home
        self.longest_s = max(self.longest_s, call.timeout_s or 0.0)
        if call.timer is None:
            call.start_timer(call.timeout_s)
        if self._caller is not call.loop:
            self._caller = call.loop
            self._ping(call.loop, call.loop.time())
        home.begin(call, self._came_back)

    def give_up(self, call: Call) -> None:
        home, more = self._homes[call], ""
        culprit = home.culprit() if home.blocked else None
        if culprit is not None and culprit.name != name_of(call.function):
            more = f": {culprit.name} blocked its event loop at {culprit.where}"
        call.settle(call.late(more))
        self.left(call)

    def left(self, call: Call) -> None:
        self._homes[call].cancel(call)
        call.loop.call_later(_PINGS_TO_END * self._ping_s, self._count_if_hung, call)

    def close(self) -> None:
        self._caller = None  # It is pinged no more.
        if self._watch is not None:
            self._watch.cancel()
        while self._loops:
            self._loops.pop().close()

    def _came_back(self, call: Call) -> None:
        self.came_back += 1
        self.hung -= call.hung
        del self._homes[call]
        call.finish()

    def _count_if_hung(self, call: Call) -> None:
        if not (call.finished.is_set() or call.hung):
            call.hung = True
            self.hung += 1
            self._on_hung()

    def _ping(self, caller: asyncio.AbstractEventLoop, due: float) -> None:
        """Ping each loop, now and then each `ping_s`.

        Args:
            caller: The caller's loop.
            due: Time of its clock when this was due, in seconds.
        """
        now = caller.time()
        for loop in self._loops:
            loop.ping(counts=now - due < self._ping_s / 2)
            if loop.blocked and not loop.told:
                culprit = loop.culprit()
                loop.told = culprit is not None
                self._on_blocked(culprit)
        if self._caller is caller:
            due = now + self._ping_s
            self._watch = caller.call_at(due, self._ping, caller, due)
