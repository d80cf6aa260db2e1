"""Where async user code runs, and what becomes of a call that is late or blocks the others.

All async code shares one event loop, so that what is bound to a loop (a session, a lock) works from call to call. While
a function blocks that loop, calls that have not begun go to a spare one, and an alarm names the function; once it lets
go, the first loop is used again. A loop that is only slow keeps its calls. Decisions are taken on the event loop of the
caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from protocol import reasons
from rollout_worker.user_code.async_code import AsyncCall, EventLoop
from rollout_worker.user_code.daemon_executor import DaemonExecutor
from rollout_worker.user_code.errors import NotCalled, UserCodeError, defined_at
from rollout_worker.user_code.steps import LOOKS

MOST_LOOPS = 4


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
        return len(self._loops) == MOST_LOOPS and all(loop.blocked for loop in self._loops)

    def hanging(self) -> str:
        """The functions that block the loops, and where."""
        culprits = [culprit for loop in self._loops if (culprit := loop.culprit()) is not None]
        told = dict.fromkeys(f"{culprit.name} ({culprit.where})" for culprit in culprits)
        return f"all {MOST_LOOPS} event loops of async code are blocked, by {', '.join(told) or 'code that has ended'}"

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
            text = (
                f"not called: all {MOST_LOOPS} event loops are blocked; await in async code, or write it as plain def"
            )
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
        if found is None and len(self._loops) < MOST_LOOPS:
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
