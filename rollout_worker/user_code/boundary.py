"""Calls the user's functions. No other module does.

Invariant: user code never runs on the caller's event loop. Sync code runs in threads, and async code on an event loop
of its own. The code that runs there also copies the arguments, turns the result into plain data and turns errors into
text. Tools may run in child processes.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any, Self

from protocol.config import TaskSection
from rollout_worker.user_code.async_code import Loops, PendingValue
from rollout_worker.user_code.errors import is_async
from rollout_worker.user_code.isolation import Processes
from rollout_worker.user_code.threads import HUNG_PER_THREAD, ShutOff, Threads
from rollout_worker.user_code.values import copied

# These signals end a process that does not handle them.
_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)

# Seconds that a sync agent may still run after its episode is over. Then it counts as hung.
_AGENT_ENDS_S = 5.0

_ISOLATE = 'set worker.tool_isolation = "process", where a tool that hangs is killed'
_OWN_TIME_OUT = "give what waits in it a time-out of its own"

Alarm = Callable[[str, str, str | None], None]


class Kind(StrEnum):
    """Names the part of the task that a sync function belongs to.

    Each kind has threads of its own. Tools that hang take none from rewards and the data set, and environments that
    hang take none from those that close.
    """

    TOOL = "tools"
    ENVIRONMENT = "environments"
    CLOSE = "the close() of environments"
    REWARD = "rewards"
    DATA = "the data set"
    CHAT = "the chat format"
    AGENT = "agents"


class UserCode:
    """Runs user code in threads, on event loops and in child processes.

    Use it as a context manager, on one event loop.

    Args:
        threads: Maximum number of sync calls of one kind that run at once, and of child processes.
        isolated: The task file whose tools `call_isolated` runs, or None.
        look_s: Seconds between two looks at the loop of async code.
        environment_threads: Maximum number of environment calls at once, if larger than `threads`.
        agents: Maximum number of agents at once, if larger than `threads`.
        may_isolate: True if the run file may set worker.tool_isolation = "process".

    Attributes:
        alarm: Called as `alarm(key, text, where)` with problems that a person should fix: hung calls, a blocked event
            loop.
        shut_off: Called as `shut_off(text)` with the cause if code of one kind cannot run any more in this process.
    """

    def __init__(
        self,
        threads: int = 64,
        isolated: TaskSection | None = None,
        look_s: float = 0.25,
        environment_threads: int = 0,
        agents: int = 0,
        may_isolate: bool = True,
    ) -> None:
        self.threads = threads
        self.alarm: Alarm = lambda key, text, where: None
        self.shut_off: Callable[[str], None] = lambda text: None
        self._shut_off = ShutOff(lambda text: self.shut_off(text))
        # Advise isolation only if the run file may ask for it and has not done so yet. It isolates tools only.
        self._of_tools = f"{_ISOLATE}, or {_OWN_TIME_OUT}" if may_isolate and isolated is None else _OWN_TIME_OUT
        most = dict.fromkeys(Kind, threads) | {Kind.ENVIRONMENT: max(threads, environment_threads)}
        self._threads = {
            kind: Threads(
                most[kind],
                partial(self._a_thread_hangs, kind),
                self._no_thread_was_free,
                self._of_tools if kind is Kind.TOOL else _OWN_TIME_OUT,
            )
            for kind in Kind
        }
        # An agent may run for as long as its episode does, and its caller sets the time-out.
        self._threads[Kind.AGENT] = Threads(
            max(threads, agents),
            partial(self._a_thread_hangs, Kind.AGENT),
            self._no_thread_was_free,
            _OWN_TIME_OUT,
            after_cancel_s=_AGENT_ENDS_S,
        )
        self._loops = Loops(threads, self._async_code_hangs, self._a_loop_is_blocked, look_s, self._of_tools)
        self._expected: list[int] = []
        self._processes = None if isolated is None else Processes(threads, isolated, self._no_thread_was_free)

    @property
    def hung(self) -> int:
        """Number of calls that were given up and are still running."""
        return sum(threads.hung for threads in self._threads.values()) + self._loops.all_hung

    def max_at_once(self, kind: Kind) -> int:
        """Maximum number of sync calls of one kind that run at once."""
        return self._threads[kind].limit

    async def __aenter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _TIMERS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    asyncio.get_running_loop().add_signal_handler(number, self._a_timer_went_off, number)
                    self._expected.append(number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._expected:
            asyncio.get_running_loop().remove_signal_handler(number)
        self._shut_off.close()
        for threads in self._threads.values():
            threads.close()
        self._loops.close()
        if self._processes is not None:
            self._processes.close()

    async def call(
        self,
        function: Callable[..., Any],
        plain: Callable[[Any], Any],
        timeout_s: float,
        kind: Kind = Kind.TOOL,
        waiting: AbstractContextManager[None] | None = None,
        /,
        **arguments: Any,
    ) -> Any:
        """Call `function(**arguments)`, await the result if it is awaitable, and turn it into plain data.

        Args:
            function: The user's function, sync or async.
            plain: Turns the result into plain data.
            timeout_s: Seconds that the call may take.
            kind: Selects the threads of a sync function.
            waiting: Context that is entered while the call waits for a thread.
            **arguments: Arguments of the function, which gets copies.

        Returns:
            `plain(result)`.

        Raises:
            UserCodeError: `function` or `plain` raised an exception, or did not finish in time.
            NotCalled: Too many calls of this kind hang.
        """
        threads = self._threads[kind]
        start = partial(_started, function, arguments)
        if is_async(function):
            result = await self._loops.run(function, start, plain, timeout_s)
        else:
            result = await threads.run(function, partial(_done, start, plain), timeout_s, waiting)
            if isinstance(result, PendingValue):
                held, left_s = result, max(0.0, timeout_s - (time.monotonic() - result.began))
                try:
                    result = await self._loops.run(function, held.take, plain, left_s, told_s=timeout_s)
                finally:
                    held.close()  # The coroutine may not have been started.
        if isinstance(result, PendingValue):
            # `plain` may take any time on a user's object, or never end.
            result = await threads.run(function, partial(_plain, result, plain), timeout_s)
        return result

    async def call_isolated(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool of the task file in a child process, which is killed if the call is late.

        Args:
            tool: Name of the tool.
            arguments: Arguments of the tool, by name.
            timeout_s: Seconds that the call may take.

        Returns:
            The result as text.

        Raises:
            UserCodeError: The tool failed or was late.
            ValueError: `UserCode` was made without a task file to isolate.
        """
        if self._processes is None:
            raise ValueError('UserCode was made without a task file: worker.tool_isolation is not "process"')
        return await self._processes.call(tool, arguments, timeout_s)

    def _a_thread_hangs(self, kind: Kind) -> None:
        threads = self._threads[kind]
        self._tell_of_hung(kind, threads.hung, threads.limit, threads.remedy)
        self._shut_off.look(threads)

    def _async_code_hangs(self) -> None:
        self._tell_of_hung("async code", self._loops.all_hung, self.threads, self._loops.remedy)

    def _tell_of_hung(self, whose: str, hung: int, threads: int, remedy: str) -> None:
        """Raise an alarm at the first hung call, when as many hang as there are threads, and when no more threads are
        given."""
        stages = {1: "", threads: "", HUNG_PER_THREAD * threads: "; no more threads are given"}
        if (more := stages.get(hung)) is not None:
            calls = f"1 call of {whose} has" if hung == 1 else f"{hung} calls of {whose} have"
            text = f"{calls} not come back after the time-out{more}: {remedy}"
            self.alarm(f"hung {whose} {hung}", text, None)

    def _no_thread_was_free(self, text: str) -> None:
        self.alarm("threads", text, None)

    def _a_loop_is_blocked(self, name: str, where: str | None) -> None:
        text = f"{name} blocks the event loop of async code: await in it, or write it as a plain def"
        self.alarm(f"blocked {name}", text, where)
        self._shut_off.look(self._loops)

    def _a_timer_went_off(self, number: int) -> None:
        text = (
            f"user code set a timer that sent {signal.Signals(number).name} to the whole worker, which ignored it, as "
            f"signals work in none of its threads: {self._of_tools}"
        )
        self.alarm("timer", text, None)


async def in_thread(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Run `function(**arguments)` in a thread, and return or raise what it does.

    This is for Slipstream's own slow code. If the caller is cancelled, the thread continues on its own.
    """
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, **arguments))


def _started(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return function(**{name: copied(value) for name, value in arguments.items()})


def _done(start: Callable[[], Any], plain: Callable[[Any], Any]) -> Any:
    """Call `start` in a thread. An awaitable result is returned in a `PendingValue`, any other as plain data."""
    began = time.monotonic()
    result = start()
    return PendingValue(result, began) if inspect.isawaitable(result) or inspect.isasyncgen(result) else plain(result)


def _plain(held: PendingValue, plain: Callable[[Any], Any]) -> Any:
    return plain(held.take())
