"""The one place where the user's functions are called.

Sync code runs in threads, async code on an event loop of its own, and never on the caller's: its arguments are copied,
its result is turned into plain data, and its errors into text, where it runs. Tools may run in child processes.
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

# What ends a process that does not expect them.
_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)

# What a sync agent has to end in, once its episode is over, before it counts as hung.
_AGENT_ENDS_S = 5.0

_ISOLATE = 'set worker.tool_isolation = "process", where a tool that hangs is killed'
_OWN_TIME_OUT = "give what waits in it a time-out of its own"

Alarm = Callable[[str, str, str | None], None]


class Kind(StrEnum):
    """What a sync function is of the task: the calls of each kind have threads of their own, so that tools that hang
    take none from rewards and the data set, and environments that hang none from those that close."""

    TOOL = "tools"
    ENVIRONMENT = "environments"
    CLOSE = "the close() of environments"
    REWARD = "rewards"
    DATA = "the data set"
    CHAT = "the chat format"
    AGENT = "agents"


class UserCode:
    """Where user code runs. `threads`: the most sync calls of one kind at one time, and the most child processes;
    `environment_threads`: of environments, if there are to be more; `agents`: of agents, likewise; `isolated`: the task
    file whose tools `call_isolated` runs; `may_isolate`: whether the run file may ask for that; `look_s`: seconds
    between two looks at the loop of async code.

    `alarm(key, text, where)` is told of what a person should mend: calls that do not come back, a blocked event loop;
    `shut_off(text)` of why code of one kind can run no more in this process. Use it as a context manager, on one event
    loop.
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
        # Advised only where it is not refused, and for what it isolates.
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
        # An agent works for as long as its episode takes, and its time-out is its caller's.
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
        """Calls that were given up and have not come back."""
        return sum(threads.hung for threads in self._threads.values()) + self._loops.all_hung

    def max_at_once(self, kind: Kind) -> int:
        """Sync calls of one kind that have a thread."""
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
        """`plain(function(**arguments))`, awaited where it is awaitable; `waiting` is entered while it waits for a
        thread. Raises `UserCodeError` if either raises anything, or it is not done in time; `NotCalled`, where too many
        of its kind hang."""
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
                    held.close()  # it may not have begun
        if isinstance(result, PendingValue):
            # Its text may take as long as it likes, or never end.
            result = await threads.run(function, partial(_plain, result, plain), timeout_s)
        return result

    async def call_isolated(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """What the task file's tool of that name gives, as text, in a child process, which is killed if it is not done
        in time. Raises `UserCodeError`, and `ValueError` if this was not made for isolated tools."""
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
        """At the first, when as many hang as there are threads, and when no more threads are given."""
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
    """What `function(**arguments)` returns or raises, run in a thread: for code of our own that takes a while. If
    cancelled, the thread goes on alone."""
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, **arguments))


def _started(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return function(**{name: copied(value) for name, value in arguments.items()})


def _done(start: Callable[[], Any], plain: Callable[[Any], Any]) -> Any:
    """In a thread. What must be awaited comes back `Held`."""
    began = time.monotonic()
    result = start()
    return PendingValue(result, began) if inspect.isawaitable(result) or inspect.isasyncgen(result) else plain(result)


def _plain(held: PendingValue, plain: Callable[[Any], Any]) -> Any:
    return plain(held.take())
