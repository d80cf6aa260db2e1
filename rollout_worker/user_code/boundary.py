"""Calls the user's functions. No other module does.

Invariant: user code never runs on the caller's event loop. Sync code runs in threads, and async code on an event loop
of its own. The code that runs there also copies the arguments, turns the result into plain data and turns errors into
text. Tools may run in child processes.

User code is shut off for good when so many calls hang that no new ones are started, and none of them returns. Slow code
returns and frees its thread, and only hung code does not. The decision therefore depends on whether any call has
returned, and not on how long calls were refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any, Self

from slipstream.protocol.config import TaskSection
from slipstream.rollout_worker.user_code.async_code import Culprit, Loops
from slipstream.rollout_worker.user_code.call import Call, CallPool
from slipstream.rollout_worker.user_code.errors import is_async
from slipstream.rollout_worker.user_code.isolation import Processes
from slipstream.rollout_worker.user_code.threads import HUNG_PER_THREAD, Threads
from slipstream.rollout_worker.user_code.values import copied

# Seconds that a sync agent may still run after its episode is over. Then it counts as hung.
_AGENT_ENDS_S = 5.0

# User code is shut off if no call has returned for this many times the longest time-out.
TIMEOUTS = 4

# Minimum of that wait, in seconds.
MIN_SHUT_OFF_S = 60.0

_ISOLATE = 'set worker.tool_isolation = "process", where a tool that hangs is killed'
_OWN_TIME_OUT = "give what waits in it a time-out of its own"

Alarm = Callable[[str, str, str | None], None]


class Kind(StrEnum):
    """Names the part of the task that a sync function belongs to.

    Each kind has its own threads. Tools that hang take none from rewards and the data set, and environments that
    hang take none from those that close. `ASYNC` is for what async code puts in threads.
    """

    TOOL = "tools"
    ENVIRONMENT = "environments"
    CLOSE = "the close() of environments"
    REWARD = "rewards"
    DATA = "the data set"
    CHAT = "the chat format"
    AGENT = "agents"
    ASYNC = "async code"


class UserCode:
    """Runs user code in threads, on event loops and in child processes.

    Use it as a context manager, on one event loop.

    Args:
        threads: Maximum number of sync calls of one kind that run at once, and of child processes.
        isolated: The task file whose tools `call_isolated` runs, or None.
        ping_s: Seconds between two pings of the loop of async code.
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
        ping_s: float = 1.0,
        environment_threads: int = 0,
        agents: int = 0,
        may_isolate: bool = True,
    ) -> None:
        self.threads = threads
        self.alarm: Alarm = lambda key, text, where: None
        self.shut_off: Callable[[str], None] = lambda text: None
        self._watched: dict[CallPool, asyncio.TimerHandle] = {}
        # Advise isolation only if the run file may ask for it and has not done so yet. It isolates tools only.
        self._of_tools = f"{_ISOLATE}, or {_OWN_TIME_OUT}" if may_isolate and isolated is None else _OWN_TIME_OUT
        most = {Kind.ENVIRONMENT: max(threads, environment_threads), Kind.AGENT: max(threads, agents)}
        self._threads = {kind: self._threads_for(kind, most.get(kind, threads)) for kind in Kind}
        self._loops = Loops(
            self._threads[Kind.ASYNC],
            partial(self._a_call_hangs, Kind.ASYNC),
            self._a_loop_is_blocked,
            self._of_tools,
            ping_s,
        )
        self._processes = None if isolated is None else Processes(threads, isolated, self._no_thread_was_free)

    @property
    def hung(self) -> int:
        """Number of calls that were given up and are still running."""
        return sum(threads.hung for threads in self._threads.values()) + self._loops.hung

    def max_at_once(self, kind: Kind) -> int:
        """Maximum number of sync calls of one kind that run at once."""
        return self._threads[kind].limit

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._watched:
            self._watched.popitem()[1].cancel()
        for threads in self._threads.values():
            threads.close()
        self._loops.close()
        if self._processes is not None:
            await self._processes.close()

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
            plain: Turns the result into plain data. It runs where the function runs.
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
        return await self.begin(function, plain, timeout_s, kind, function, **arguments).result(waiting)

    def begin(
        self,
        function: Callable[..., Any],
        plain: Callable[[Any], Any],
        timeout_s: float,
        kind: Kind,
        named: Callable[..., Any],
        /,
        **arguments: Any,
    ) -> Call:
        """Start a call, whose result is to be awaited, and whose end can be. Arguments and errors are those of `call`.

        Args:
            named: The user's function, which errors name. It decides whether `function` is sync or async.
        """
        call = Call(named, partial(_started, function, arguments), plain, timeout_s, self._loops)
        (self._loops if is_async(named) else self._threads[kind]).begin(call)
        return call

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

    def _threads_for(self, kind: Kind, limit: int) -> Threads:
        return Threads(
            limit,
            partial(self._a_call_hangs, kind),
            self._no_thread_was_free,
            self._of_tools if kind in (Kind.TOOL, Kind.ASYNC) else _OWN_TIME_OUT,
            # An agent may run for as long as its episode does, and its caller sets the time-out.
            after_cancel_s=_AGENT_ENDS_S if kind is Kind.AGENT else None,
        )

    def _a_call_hangs(self, kind: Kind) -> None:
        """Raise an alarm at the first hung call, when as many hang as there are threads, and when no more threads are
        given."""
        threads = self._threads[kind]
        hung = threads.hung + (self._loops.hung if kind is Kind.ASYNC else 0)
        stages = {1: "", threads.limit: "", HUNG_PER_THREAD * threads.limit: "; no more threads are given"}
        if (more := stages.get(hung)) is not None:
            calls = f"1 call of {kind} has" if hung == 1 else f"{hung} calls of {kind} have"
            text = f"{calls} not come back after the time-out{more}: {threads.remedy}"
            self.alarm(f"hung {kind} {hung}", text, None)
        self._watch(threads)

    def _no_thread_was_free(self, text: str) -> None:
        self.alarm("threads", text, None)

    def _a_loop_is_blocked(self, culprit: Culprit | None) -> None:
        if culprit is not None:
            text = f"{culprit.name} blocks the event loop of async code: await in it, or write it as a plain def"
            self.alarm(f"blocked {culprit.name}", text, culprit.where)
        self._watch(self._loops)

    def _watch(self, pool: CallPool) -> None:
        """Decide later whether user code is shut off, if a pool is full."""
        if pool.full and pool not in self._watched:
            seconds = max(MIN_SHUT_OFF_S, TIMEOUTS * pool.longest_s)
            loop = asyncio.get_running_loop()
            self._watched[pool] = loop.call_later(seconds, self._decide, pool, pool.came_back, seconds)

    def _decide(self, pool: CallPool, came_back: int, seconds: float) -> None:
        del self._watched[pool]
        if pool.full and pool.came_back == came_back:
            self.shut_off(
                f"user code is shut off: {pool.hanging()}; none has come back for {seconds:g} s, and no more are "
                f"begun: {pool.remedy}"
            )
        else:
            self._watch(pool)


def _started(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return function(**{name: copied(value) for name, value in arguments.items()})
