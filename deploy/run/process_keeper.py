"""Keeps the processes of a run going: each is started again as the policy allows, until the learner has ended.

What is waited for, what ended and why, and what is started again is said on the terminal.

What follows from the end of a child: it is done, it is started again, or the run is over. No I/O.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deploy.run.processes import Child, Children, Program, Role, describe_end
from deploy.run.terminal import Terminal
from protocol import access, reasons
from protocol.config import RunConfig

# The exit code for a wrong setting: the process would only end in the same way again.
WRONG_SETTING = 2

# The exit codes of a process that was stopped on purpose.
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))

# What has been up so long does not count as dying in a row.
STEADY_AFTER_S = 60.0

# Before the first restart in a row; each further one waits twice as long.
FIRST_PAUSE_S = 1.0

MAX_PAUSE_S = 60.0


@dataclass(frozen=True)
class Done:
    """It had nothing left to do: a worker ends with 0 only once the run is finished."""


@dataclass(frozen=True)
class Again:
    """It is started again after `pause_s`, for the `attempt`-th time in a row."""

    pause_s: float
    attempt: int


@dataclass(frozen=True)
class Over:
    """The run ends with `code`. `why`: what to say besides how the child ended; `remedy`: what to do; both or either
    may be empty."""

    code: int
    why: str = ""
    remedy: str = ""


Verdict = Done | Again | Over


class RestartPolicy:
    """A vLLM server, a worker or the queue is started again up to `times` in a row; the learner's end ends the run.

    `to_go_on`: what to do after the learner's end, asked for when it has ended; `clock`: seconds, monotonic.
    """

    def __init__(self, times: int, to_go_on: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self.times = times
        self._to_go_on = to_go_on
        self._clock = clock
        self._in_a_row: Counter[str] = Counter()
        self._up_since: dict[str, float] = {}
        self._was_up: set[str] = set()

    def up(self, name: str) -> None:
        """It answers, or was started where it has no route to ask."""
        self._up_since[name] = self._clock()
        self._was_up.add(name)

    def ended(self, name: str, role: Role, code: int, goes_on: bool = False) -> Verdict:
        """`code`: the exit code, 128 + n for signal n. A server or a queue has no good reason to end, not even 0.

        `goes_on`: the run is not finished, so that a worker has none either.
        """
        up_since = self._up_since.pop(name, None)
        if code == 0 and role in ("worker", "learner") and not goes_on:
            return Done()
        code = code or 1
        if role == "learner":
            return Over(code, remedy="" if code in (WRONG_SETTING, *STOPPED) else self._to_go_on())
        if code == WRONG_SETTING:
            return Over(code, "(a wrong setting)")
        if role == "vllm" and name not in self._was_up:
            return Over(code, "before it ever answered")
        if up_since is not None and self._clock() - up_since >= STEADY_AFTER_S:
            self._in_a_row[name] = 0
        if self._in_a_row[name] >= self.times:
            return Over(code, f"once more than deploy.restart = {self.times} allows" if self.times else "")
        self._in_a_row[name] += 1
        attempt = self._in_a_row[name]
        return Again(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 10)), attempt)


HEALTH_TIMEOUT_S = 5.0

HEALTH_EVERY_S = 0.25

GIVEN_UP_EVERY_S = 1.0

LAST_LINES = 20

# vLLM's engine processes ignore SIGTERM for long when their server is gone.
ORPHANS_GRACE_S = 1.0


class RunFailed(RuntimeError):
    """The run ended for a reason that no check could have found before. `code`: the exit code that tells it."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class ProcessKeeper:
    """Keeps programs running, each started again as the policy allows, until the learner has ended."""

    def __init__(
        self, config: RunConfig, children: Children, policy: RestartPolicy, log_dir: Path, terminal: Terminal
    ) -> None:
        self._config = config
        self._children = children
        self._policy = policy
        self._log_dir = log_dir
        self._terminal = terminal

    async def keep(self, programs: Sequence[Program]) -> None:
        """Raises `RunFailed`."""
        self._terminal.say(f"starting {', '.join(program.name for program in programs)}; logs in {self._log_dir}")
        try:
            async with _session() as http, asyncio.TaskGroup() as tasks:
                kept = [(program.role, tasks.create_task(self._keep(program, http))) for program in programs]
                await next(task for role, task in kept if role == "learner")
                self._terminal.say("stopping the others")
                for _, task in kept:
                    task.cancel()
        except ExceptionGroup as errors:
            failures, _ = errors.split(RunFailed)
            raise (failures or errors).exceptions[0] from None

    async def _keep(self, program: Program, http: aiohttp.ClientSession) -> None:
        """One program over all its lives."""
        name = program.name
        while True:
            child = self._start(program)
            async with asyncio.TaskGroup() as life:
                watching = life.create_task(self._until_up(child, http))
                code = await child.wait()
                watching.cancel()
            self._terminal.down(name)
            self._terminal.pass_on()
            if program.role == "worker" and code:
                await self._while_given_up(http)
            # A worker ends with 0 when the run is finished; so may a tool that ends its process.
            goes_on = program.role == "worker" and code == 0 and await self._goes_on(http)
            match self._policy.ended(name, program.role, code, goes_on):
                case Done():
                    self._terminal.say(f"{name} is done")
                    await self._children.end([child])
                    return
                case Over(end_code, why, remedy):
                    ended = "; ".join(filter(None, [f"{describe_end(name, code)} {why}".rstrip(), remedy]))
                    self._terminal.complain(f"{describe_end(name, code)}; stopping the others")
                    raise RunFailed(ended + _quoted(child), end_code)
                case Again(pause_s, attempt):
                    cause = child.first_error()
                    self._terminal.complain(
                        f"{describe_end(name, code)}{f': {cause}' if cause else ''}; starting it again in "
                        f"{pause_s:g} s (restart {attempt} of {self._policy.times} in a row)"
                    )
                    # An engine without its server has nothing to save, and holds the memory that the next one needs.
                    await self._children.end([child], ORPHANS_GRACE_S if program.role == "vllm" else None)
                    await asyncio.sleep(pause_s)

    async def _while_given_up(self, http: aiohttp.ClientSession) -> None:
        """The learner ends by it too, and says why: once is enough. A late success takes the verdict back."""
        while True:
            if not (await self._told(access.STATUS, http)).get(reasons.GAVE_UP):
                return
            await asyncio.sleep(GIVEN_UP_EVERY_S)

    async def _goes_on(self, http: aiohttp.ClientSession) -> bool:
        """Whether the queue says that the run is not finished."""
        return (await self._told(access.POLICY, http)).get("finished", True) is False

    async def _told(self, route: str, http: aiohttp.ClientSession) -> Mapping[str, Any]:
        """What the queue answers; nothing where it does not."""
        token = self._config.token_for("viewer")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with http.get(self._config.queue.url + route, headers=headers) as response:
                answer = await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return {}
        return answer if isinstance(answer, Mapping) else {}

    def _start(self, program: Program) -> Child:
        try:
            if program.role != "learner":
                return self._children.start(program, self._log_dir)
            with self._terminal.learners_stdout() as stdout:
                return self._children.start(program, self._log_dir, stdout)
        except OSError as error:
            raise RunFailed(f"{program.name} cannot be started: {error}") from error

    async def _until_up(self, child: Child, http: aiohttp.ClientSession) -> None:
        """Tell the policy, and the terminal, when the child answers."""
        health, started = child.program.health, time.monotonic()
        if health:
            with self._terminal.waiting_for(child.name, child.log):
                while True:
                    if await _answers(health, http):
                        break
                    await asyncio.sleep(HEALTH_EVERY_S)
        self._policy.up(child.name)
        self._terminal.up(child.name)
        if health:
            self._terminal.say(f"{child.name} answers after {time.monotonic() - started:.1f} s")


def _quoted(child: Child) -> str:
    """What its log says of its end."""
    if cause := child.first_error():
        return f"; the first error in {child.log}:\n{cause}"
    lines = "\n".join(child.tail()[-LAST_LINES:])
    return f"; the last lines of {child.log}:\n{lines}" if lines.strip() else ""


def _session() -> aiohttp.ClientSession:
    # No connection is used twice: a server that is starting or ending hangs up without saying so.
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))


async def _answers(health: str, http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get(health) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
