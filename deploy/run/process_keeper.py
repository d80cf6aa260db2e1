"""Keeps the processes of a run running until the learner has ended.

`RestartPolicy` decides without I/O whether a process that ended is done, is restarted, or ends the run. `ProcessKeeper`
starts the processes, asks the policy, and shows on the terminal each wait and each end.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from slipstream.deploy.run.processes import MAX_LOG_BYTES, Child, Children, ProcessKind, Program, describe_end
from slipstream.deploy.run.terminal import Terminal
from slipstream.learner.ranks.liveness import RANK_LOST
from slipstream.protocol import access, reasons
from slipstream.protocol.addresses import split_urls
from slipstream.protocol.config import RunConfig

# Exit code for a wrong setting: a process that is started for the first time, or a worker, would end so again.
WRONG_SETTING = 2

# Exit code of a learner from which another one has taken the run.
TAKEN_OVER = 76

# Of a script that ends with 0 while the run is not finished.
SCRIPT_LEFT = "before the run was finished: does learner.script call main(), and join() the run?"

# Exit codes of a process that was stopped on purpose.
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

# The count of restarts in a row begins again once a process has been up this long.
STEADY_AFTER_S = 60.0

# Before the first restart in a row; each further one waits twice as long.
FIRST_PAUSE_S = 1.0

MAX_PAUSE_S = 60.0


@dataclass(frozen=True)
class Done:
    """The process had nothing left to do: a worker ends with 0 only once the run is finished."""


@dataclass(frozen=True)
class Again:
    """The process is restarted after `pause_s` seconds, for the `attempt`-th time in a row."""

    pause_s: float
    attempt: int


@dataclass(frozen=True)
class Over:
    """The run ends.

    Attributes:
        code: Exit code of the run.
        why: Text to add to how the process ended; may be empty.
        remedy: What to do; may be empty.
    """

    code: int
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """Another learner has taken the run over. The rest is kept running for it, until the run is finished."""


Verdict = Done | Again | Over | Elsewhere


class RestartPolicy:
    """Restarts a server, a worker or the queue, and a learner that has lost a rank; any other end of the learner
    ends the run.

    Args:
        times: Maximum number of restarts in a row of one process.
        to_go_on: Says what to do after a failed learner; called when it has ended.
        clock: Monotonic time in seconds.
    """

    def __init__(self, times: int, to_go_on: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self.times = times
        self._to_go_on = to_go_on
        self._clock = clock
        self._in_a_row: Counter[str] = Counter()
        self._up_since: dict[str, float] = {}
        self._was_up: set[str] = set()

    def up(self, name: str) -> None:
        """Note that the process answers, or has started if it has no route to ask."""
        self._up_since[name] = self._clock()
        self._was_up.add(name)

    def was_up(self, name: str) -> bool:
        """Return whether the process has ever answered."""
        return name in self._was_up

    def ended(
        self, name: str, role: ProcessKind, code: int, goes_on: bool = False, leaves: bool = False, lost: bool = False
    ) -> Verdict:
        """Decide what follows from the end of a process.

        A server or a queue has no good reason to end, even with 0.

        Args:
            name: Name of the process.
            role: Role of the process.
            code: Exit code; 128 + n for signal n.
            goes_on: Whether the queue says that the run is not finished; then a worker, or a trainer of the user's own,
                has no reason to end either.
            leaves: Whether it is a server that joined the run, which ends with 0 once it was removed from it.
            lost: Whether it is a learner that has lost one of its ranks.
        """
        up_since = self._up_since.pop(name, None)
        if code == 0 and leaves:
            return Done()
        if code == 0 and role in ("worker", "learner") and not goes_on:
            return Done()
        if code == 0 and role == "learner":
            return Over(1, SCRIPT_LEFT, self._to_go_on())
        code = code or 1
        if role == "learner" and code == TAKEN_OVER:
            return Elsewhere()
        if role == "learner" and (not lost or code in (WRONG_SETTING, *STOPPED)):
            return Over(code, remedy="" if code in (WRONG_SETTING, *STOPPED) else self._to_go_on())
        # The settings of a queue or a server that was up are right: something has changed, such as who has its port.
        if code == WRONG_SETTING and (role == "worker" or not self.was_up(name)):
            return Over(code, "(a wrong setting)")
        # It would end so again; one that a signal ended would not.
        if role == "vllm" and not self.was_up(name) and code <= 128:
            return Over(code, "before it ever answered")
        if up_since is not None and self._clock() - up_since >= STEADY_AFTER_S:
            self._in_a_row[name] = 0
        if self._in_a_row[name] >= self.times:
            why = f"once more than deploy.restart = {self.times} allows" if self.times else ""
            return Over(code, why, self._to_go_on() if role == "learner" else "")
        self._in_a_row[name] += 1
        attempt = self._in_a_row[name]
        return Again(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 10)), attempt)


HEALTH_TIMEOUT_S = 5.0

HEALTH_EVERY_S = 0.25

GIVE_UP_POLL_S = 1.0

LAST_LINES = 20

LOGS_EVERY_S = 10.0

LEARNER_EVERY_S = 5.0

# With less room a process may not even say why it ends.
FULL_BELOW_BYTES = 256 * 1024

# For rank 0 to find out that another rank has died, and for the others to end with it.
RANKS_END_WITHIN_S = 10.0

# A server's engine processes react late to SIGTERM once their server is gone.
ORPHANS_GRACE_S = 1.0


class RunFailed(RuntimeError):
    """The run ended for a reason that no check could have found. `code` is the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class ProcessKeeper:
    """Keeps programs running, restarting each as the policy allows, until the learner has ended."""

    def __init__(
        self, config: RunConfig, children: Children, policy: RestartPolicy, log_dir: Path, terminal: Terminal
    ) -> None:
        self._config = config
        self._children = children
        self._policy = policy
        self._log_dir = log_dir
        self._terminal = terminal

    async def keep(self, programs: Sequence[Program]) -> None:
        """Run the programs until the learner is done. Raises `RunFailed` if the policy ends the run."""
        self._terminal.say(f"starting {', '.join(program.name for program in programs)}; logs in {self._log_dir}")
        try:
            async with _session() as http, asyncio.TaskGroup() as tasks:
                ranks = [program for program in programs if program.role == "rank"]
                kept = [
                    (each.role, tasks.create_task(self._keep(each, http, ranks if each.role == "learner" else ())))
                    for each in programs
                    if each not in ranks
                ]
                watches = [tasks.create_task(self._bound_logs()), tasks.create_task(self._watch_learner(http))]
                await next(task for role, task in kept if role == "learner")
                for watch in watches:
                    watch.cancel()
                self._terminal.say("stopping the others")
                for _, task in kept:
                    task.cancel()
        except ExceptionGroup as errors:
            failures, _ = errors.split(RunFailed)
            raise (failures or errors).exceptions[0] from None

    async def _bound_logs(self) -> None:
        """Keep logs short. Tells the first time for each process, since something prints much there."""
        told: set[str] = set()
        while True:
            await asyncio.sleep(LOGS_EVERY_S)
            for child in self._children.living:
                if child.bound_log() and child.name not in told:
                    told.add(child.name)
                    self._terminal.complain(
                        f"{child.log} grew beyond {MAX_LOG_BYTES // 1024**2} MiB: its middle was dropped, and is from "
                        f"now on; what prints so much there?"
                    )

    async def _watch_learner(self, http: aiohttp.ClientSession) -> None:
        """Tell that the queue no longer hears from the learner: a process that is stopped, or hangs, says nothing on
        this terminal itself. It renews its lease three times in the time after which that is told."""
        patience_s, silent = self._config.queue.lease_timeout_s, False
        while True:
            await asyncio.sleep(LEARNER_EVERY_S)
            position = await self._ask_queue(access.POLICY, http)
            seen_s_ago = (position.get("learner") or {}).get("seen_s_ago")
            if seen_s_ago is None or position.get("finished"):
                continue
            if seen_s_ago > patience_s and not silent:
                self._terminal.complain(
                    f"the queue has not heard from the learner for {seen_s_ago:.0f} s: is its process stopped, does it "
                    f"hang, or is it cut off from the queue?"
                )
            elif seen_s_ago <= patience_s and silent:
                self._terminal.say("the learner is heard from again")
            silent = seen_s_ago > patience_s

    async def _keep(self, program: Program, http: aiohttp.ClientSession, ranks: Sequence[Program] = ()) -> None:
        """Run one program, restarts included; a learner with its further `ranks`, which end and start with it."""
        name = program.name
        while True:
            child = self._start(program)
            others = [self._start(rank) for rank in ranks]
            async with asyncio.TaskGroup() as life:
                watching = life.create_task(self._until_up(child, http))
                code, lost = await self._end_of(child, others)
                watching.cancel()
            self._terminal.down(name)
            self._terminal.pass_on()
            if program.role == "worker" and code:
                await self._while_given_up(http)
            # A worker ends with 0 when the run is finished, but a tool may end its process with 0 too, and so may a
            # script that never joined.
            may_go_on = program.role == "worker" or (program.role == "learner" and self._config.learner.script)
            goes_on = bool(may_go_on) and code == 0 and await self._goes_on(http)
            match self._policy.ended(name, program.role, code, goes_on, program.leaves, lost is not None):
                case Done():
                    self._terminal.say(f"{name} is done")
                    await self._children.end([child])
                    return
                case Elsewhere():
                    self._terminal.complain(
                        f"{name} has ended, as another one has taken the run over; the queue, servers and workers here "
                        f"are kept for it until the run is finished"
                    )
                    await self._children.end([child])
                    await self._until_finished(http)
                    return
                case Over(end_code, why, remedy):
                    ended = "; ".join(filter(None, [f"{describe_end(name, code)} {why}".rstrip(), remedy]))
                    self._terminal.complain(f"{describe_end(name, code)}; stopping the others")
                    raise RunFailed(ended + _quoted(child), end_code)
                case Again(pause_s, attempt):
                    died = child if lost is None else lost
                    end = died.poll() or code
                    # Of one that was killed or told to end, an error in the log is one which it has survived.
                    by_others = end in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
                    cause = None if by_others else died.first_error()
                    again = "starting it again"
                    new = program.role == "vllm" and not self._policy.was_up(name)
                    if lost is not None:
                        again = "starting all ranks of the learner again from the newest checkpoint"
                        program = replace(program, command=with_resume(program.command))
                    why = f"{f': {cause}' if cause else ''}{_why_short(child.log)}"
                    self._terminal.complain(
                        f"{describe_end(died.name, end)}{' before it ever answered' if new else ''}{why}; {again} in "
                        f"{pause_s:g} s (restart {attempt} of {self._policy.times} in a row)"
                        + (_last_lines(child) if new else "")
                    )
                    # An engine without its server has nothing to save, and holds memory that the next one needs.
                    await self._children.end([child], ORPHANS_GRACE_S if program.role == "vllm" else None)
                    await asyncio.sleep(pause_s)

    async def _end_of(self, child: Child, ranks: Sequence[Child]) -> tuple[int, Child | None]:
        """Wait for the end of a program, and of a learner's further ranks.

        Returns:
            The exit code, and the rank of the learner with which all others were lost; None if none was.
        """
        learner = asyncio.ensure_future(child.wait())
        rank_died = asyncio.ensure_future(_first_to_fail(ranks))
        hung = False
        try:
            await asyncio.wait([learner, rank_died], return_when=asyncio.FIRST_COMPLETED)
            if not learner.done():
                # Its connections to that rank break, and it says so. Else it would wait for learner.rank_timeout_s.
                await asyncio.wait([learner], timeout=RANKS_END_WITHIN_S)
                hung = not learner.done()
                await self._children.end([child], ORPHANS_GRACE_S)
            code = await learner
            if ranks:
                await self._children.end(ranks, RANKS_END_WITHIN_S if code == 0 else ORPHANS_GRACE_S)
            died = rank_died.result() if rank_died.done() else None
        finally:
            learner.cancel()
            rank_died.cancel()
        rank_code = 0 if died is None else died.poll() or 0
        if died is not None and rank_code == WRONG_SETTING:
            raise RunFailed(f"{describe_end(died.name, rank_code)}{_quoted(died)}", rank_code)
        if child.program.role != "learner" or self._config.learner.ranks == 1:
            return code, None
        if died is not None and code and (hung or rank_code > 128):
            return RANK_LOST, died
        return code, child if code == RANK_LOST or (code > 128 and code not in STOPPED) else None

    async def _while_given_up(self, http: aiohttp.ClientSession) -> None:
        """Wait while the queue has given the run up: the learner then ends too, and reports the reason once.

        A late success withdraws the verdict, and the worker is restarted.
        """
        while True:
            if not (await self._ask_queue(access.STATUS, http)).get(reasons.GAVE_UP):
                return
            await asyncio.sleep(GIVE_UP_POLL_S)

    async def _until_finished(self, http: aiohttp.ClientSession) -> None:
        """Wait until the queue says that the run is finished, and tell a standstill, which no learner here shows."""
        stalled = False
        while not (await self._ask_queue(access.POLICY, http)).get("finished"):
            stall = (await self._ask_queue(access.STATUS, http)).get("stall") or {}
            if stall.get("stalled") and not stalled:
                self._terminal.complain(f"stalled: no step for {stall.get('since_s', 0):.0f} s: {stall.get('why')}")
            stalled = bool(stall.get("stalled"))
            await asyncio.sleep(GIVE_UP_POLL_S)
        self._terminal.say("the run is finished")

    async def _goes_on(self, http: aiohttp.ClientSession) -> bool:
        """Tell whether the queue says that the run is not finished."""
        return (await self._ask_queue(access.POLICY, http)).get("finished", True) is False

    async def _ask_queue(self, route: str, http: aiohttp.ClientSession) -> Mapping[str, Any]:
        """Return the queue's JSON object, {} if it does not answer."""
        token = self._config.token_for("viewer")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for url in split_urls(self._config.queue.address):
            try:
                async with http.get(url + route, headers=headers) as response:
                    answer = await response.json(content_type=None) if response.status == 200 else None
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                continue
            if isinstance(answer, Mapping):
                return answer
        return {}

    def _start(self, program: Program) -> Child:
        try:
            if program.role != "learner":
                return self._children.start(program, self._log_dir)
            with self._terminal.learners_stdout() as stdout:
                return self._children.start(program, self._log_dir, stdout)
        except OSError as error:
            raise RunFailed(f"{program.name} cannot be started: {error}") from error

    async def _until_up(self, child: Child, http: aiohttp.ClientSession) -> None:
        """Wait until the child answers, then tell the policy and the terminal."""
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


async def _first_to_fail(ranks: Sequence[Child]) -> Child:
    """Wait until a rank fails. Runs until cancelled where none does."""
    waits = {asyncio.ensure_future(rank.wait()): rank for rank in ranks}
    try:
        for ended in asyncio.as_completed([*waits]):
            if await ended:
                return next(rank for rank in ranks if rank.poll())
        await asyncio.Event().wait()
        raise AssertionError
    finally:
        for wait in waits:
            wait.cancel()


def with_resume(command: Sequence[str]) -> list[str]:
    """Return a learner's command so that it continues from the newest checkpoint."""
    return [*command] if "--resume" in command else [*command, "--resume"]


def _quoted(child: Child) -> str:
    """Quote the child's log: its first error, else its last lines."""
    short = _why_short(child.log)
    if cause := child.first_error():
        return f"{short}; the first error in {child.log}:\n{cause}"
    return short + _last_lines(child)


def _last_lines(child: Child) -> str:
    lines = "\n".join(child.tail()[-LAST_LINES:])
    return f"; the last lines of {child.log}:\n{lines}" if lines.strip() else ""


def _why_short(log: Path) -> str:
    """Say so where a log was deleted, or may end early because its disk is full; else return an empty text."""
    if not log.exists():
        return f"; its log {log} was deleted or moved while it ran, and its last words with it"
    try:
        free = shutil.disk_usage(log.parent).free
    except OSError:
        return ""
    if free >= FULL_BELOW_BYTES:
        return ""
    return f"; the disk of {log.parent} is full ({free:,} bytes are free): make room, as its log may end early"


def _session() -> aiohttp.ClientSession:
    # No connection is reused: a server that starts or ends closes connections without notice.
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))


async def _answers(health: str, http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get(health) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
