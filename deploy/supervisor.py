"""Everything on one machine: checks, starts, watches, starts again and stops the processes of a run.

Nothing is left running, however the run ends: each child has a process group of its own, which gets SIGTERM and, after
`deploy.grace_s`, SIGKILL; if the supervisor itself is killed, its watchdog does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import aiohttp

from deploy.children import Child, Children, describe_end
from deploy.preflight import held_alone, resolved, write_resolved
from deploy.programs import Program, preflight_program, programs
from deploy.restart import WRONG_SETTING, Again, Done, Over, RestartPolicy
from protocol import routes
from protocol.config import ConfigError, RunConfig

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
HEALTH_TIMEOUT_S = 5.0
HEALTH_EVERY_S = 0.25
# How often the terminal says again what is waited for.
SAY_EVERY_S = 30.0
LAST_LINES = 20


class RunFailed(RuntimeError):
    """The run ended for a reason that no check could have found before. `code`: the exit code that tells it."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def supervise(config: RunConfig, resume: bool = False) -> None:
    """Run everything until the learner has made its last step.

    Raises `ConfigError` for a wrong setting, before anything is started; `RunFailed`; KeyboardInterrupt on Ctrl-C, and
    `SystemExit` with 143 or 129 on SIGTERM or SIGHUP. By then every process has ended.
    """

    async def work(children: Children) -> None:
        await _check(config, resume, children)
        with held_alone(config):
            run_file = write_resolved(config).absolute()
            say(f"run directory {run_file.parent}, status at {config.queue.url}{routes.STATUS}")
            policy = RestartPolicy(config.deploy.restart)
            await Keeper(children, policy, run_file.parent / "logs").keep(programs(config, run_file, resume))

    under_signals(work, config.deploy.grace_s)


def under_signals(work: Callable[[Children], Coroutine[None, None, None]], grace_s: float) -> None:
    """Run `work`; at its end, or at a signal, end all children. Raises what `work` raises, and as `supervise` does."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a run can be supervised from the main thread only, since it handles signals; start it there")
    number = asyncio.run(_under_signals(work, grace_s))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(128 + number)


async def _under_signals(
    work: Callable[[Children], Coroutine[None, None, None]], grace_s: float
) -> signal.Signals | None:
    """The signal that ended the work."""
    signalled: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def note(number: signal.Signals) -> None:
        # A second signal changes nothing: all that was started gets its time to end.
        if not signalled.done():
            signalled.set_result(number)
            complain(f"{SIGNALS[number]}, stopping; what has not ended in {grace_s:g} s is killed")

    children = Children(grace_s)
    with _handlers(note, children.reap), children:
        working = asyncio.create_task(work(children))
        try:
            first: list[asyncio.Future[Any]] = [working, signalled]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            await asyncio.wait({working})
            await children.end(list(children.living))
        if signalled.done() and (working.cancelled() or working.exception()):
            return signalled.result()
        await working
        return None


@contextlib.contextmanager
def _handlers(note: Callable[[signal.Signals], None], reap: Callable[[], None]) -> Iterator[None]:
    """Handle the signals that stop a run, unless one is ignored (nohup), and a child's end."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCHLD)}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, note, number)
    loop.add_signal_handler(signal.SIGCHLD, reap)
    try:
        yield
    finally:
        for number in (*handled, signal.SIGCHLD):
            loop.remove_signal_handler(number)
            if before[number] is not None:  # None: not set from Python
                signal.signal(number, before[number])


async def _check(config: RunConfig, resume: bool, children: Children) -> None:
    """Run the checks in a process of their own: they import the user's task file, whose prints, threads and libraries
    do not belong here. Raises `ConfigError`."""
    with _scratch_file(resolved(config)) as run_file:
        child = children.start(preflight_program(config, run_file, resume), run_file.parent)
        async with _reminders("the check of run file, task and model"):
            code = await child.wait()
        fault = "\n".join(child.tail())
        await children.end([child])
    if code == WRONG_SETTING and fault:
        raise ConfigError(fault)
    if code:
        raise RunFailed(describe_end("the check before the start", code), code)


@contextlib.contextmanager
def _scratch_file(text: str) -> Iterator[Path]:
    """A run file outside the run directory, which is made only once the checks have passed."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder, "run.toml")
        path.write_text(text, encoding="utf-8")
        yield path


class Keeper:
    """Keeps programs running, each started again as the policy allows, until the learner has ended."""

    def __init__(self, children: Children, policy: RestartPolicy, log_dir: Path) -> None:
        self._children = children
        self._policy = policy
        self._log_dir = log_dir

    async def keep(self, programs: Sequence[Program]) -> None:
        """Raises `RunFailed`."""
        say(f"starting {', '.join(program.name for program in programs)}; logs in {self._log_dir}")
        try:
            async with _session() as http, asyncio.TaskGroup() as tasks:
                kept = [(program.role, tasks.create_task(self._keep(program, http))) for program in programs]
                await next(task for role, task in kept if role == "learner")
                say("stopping the others")
                for _, task in kept:
                    task.cancel()
        except ExceptionGroup as errors:
            failures, _ = errors.split(RunFailed)
            raise (failures or errors).exceptions[0] from None

    async def _keep(self, program: Program, http: aiohttp.ClientSession) -> None:
        """One program over all its lives."""
        name = program.name
        while True:
            try:
                child = self._children.start(program, self._log_dir)
            except OSError as error:
                raise RunFailed(f"{name} cannot be started: {error}") from error
            async with asyncio.TaskGroup() as life:
                watching = life.create_task(self._until_up(child, http))
                code = await child.wait()
                watching.cancel()
            match self._policy.ended(name, program.role, code):
                case Done():
                    say(f"{name} is done")
                    await self._children.end([child])
                    return
                case Over(end_code, why):
                    ended = f"{describe_end(name, code)}{'' if why.startswith(';') else ' '}{why}".rstrip()
                    complain(f"{ended}; stopping the others")
                    lines = "\n".join(child.tail()[-LAST_LINES:])
                    quoted = f"; the last lines of {child.log}:\n{lines}" if lines.strip() else ""
                    raise RunFailed(f"{ended}{quoted}", end_code)
                case Again(pause_s, attempt):
                    cause = child.first_error()
                    complain(
                        f"{describe_end(name, code)}{f': {cause}' if cause else ''}; starting it again in "
                        f"{pause_s:g} s (restart {attempt} of {self._policy.times} in a row)"
                    )
                    await self._children.end([child])
                    await asyncio.sleep(pause_s)

    async def _until_up(self, child: Child, http: aiohttp.ClientSession) -> None:
        """Tell the policy, and the terminal, when the child answers."""
        health, started = child.program.health, time.monotonic()
        async with _reminders(f"{child.name}; its log: {child.log}"):
            while health:
                if await _answers(health, http):
                    break
                await asyncio.sleep(HEALTH_EVERY_S)
        self._policy.up(child.name)
        if health:
            say(f"{child.name} answers after {time.monotonic() - started:.1f} s")


@contextlib.asynccontextmanager
async def _reminders(what: str) -> AsyncIterator[None]:
    """Say now and then that `what` is still waited for."""

    async def remind() -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(SAY_EVERY_S)
            say(f"waiting for {time.monotonic() - started:.0f} s for {what}")

    async with asyncio.TaskGroup() as tasks:
        reminding = tasks.create_task(remind())
        yield
        reminding.cancel()


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


def say(text: str) -> None:
    _print(text, sys.stdout)


def complain(text: str) -> None:
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    # On a terminal the learner's live line may stand where this one goes.
    erase = "\r\x1b[2K" if stream.isatty() else ""
    with contextlib.suppress(OSError):  # a terminal that is gone must not keep a run from being stopped
        print(f"{erase}slipstream: {text}", file=stream, flush=True)
