"""Everything on one machine: checks, starts, watches, starts again and stops the processes of a run.

Nothing is left running, however the run ends: each child has a process group of its own, which gets SIGTERM and, after
`deploy.grace_s`, SIGKILL; if the supervisor itself is killed, its watchdog does it. The learner is ended before the
others, so that the queue still takes its last report.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from deploy import devices, epochs
from deploy.children import Child, Children, describe_end
from deploy.programs import Program, preflight_program, programs
from deploy.restart import WRONG_SETTING, Again, Done, Over, RestartPolicy
from deploy.run_directory import (
    check_unused,
    clear,
    finished,
    held_alone,
    kept_if_no_step_is_made,
    resolved,
    to_go_on,
    write_resolved,
)
from deploy.terminal import Terminal
from deploy.vllm_server import on_cpu, with_cache_size
from protocol import checkpoints, reasons, routes
from protocol.config import ConfigError, RunConfig

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
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


def supervise(config: RunConfig, resume: bool = False) -> None:
    """Run everything until the learner has made its last step; nothing, to `resume` a run that has made it.

    Raises `ConfigError` for a wrong setting, before anything is started; `RunFailed`; KeyboardInterrupt on Ctrl-C, and
    `SystemExit` with 143 or 129 on SIGTERM or SIGHUP. By then every process has ended.
    """

    async def work(children: Children, terminal: Terminal) -> None:
        check_unused(config)
        rows = await _check(config, resume, children, terminal)
        counted = epochs.in_steps(config, rows)
        if resume and (made := finished(counted)) is not None:
            terminal.say(checkpoints.nothing_to_do(config.run.name, made, counted.learner.steps))
            return
        planned, counted = devices.settle(counted, on_cpu(), terminal.say)
        with held_alone(config):
            if not resume and (aside := clear(config)):
                terminal.say(f"an earlier start made no step; what it left is in {aside}")
            if resume:
                settings.enter_context(kept_if_no_step_is_made(config))
            run_file = write_resolved(with_cache_size(counted)).absolute()
            terminal.say(f"run directory {run_file.parent}, status at {config.queue.url}{routes.STATUS}")
            if rows is not None and config.learner.epochs is not None:
                terminal.say(epochs.told(config, rows))
            policy = RestartPolicy(config.deploy.restart, lambda: to_go_on(config))
            keeper = Keeper(counted, children, policy, run_file.parent / "logs", terminal)
            await keeper.keep(programs(counted, run_file, resume, planned))

    with contextlib.ExitStack() as settings:  # till all have ended: the learner may make a step on its way out
        under_signals(work, config.deploy.grace_s)


def under_signals(work: Callable[[Children, Terminal], Coroutine[None, None, None]], grace_s: float) -> None:
    """Run `work`; at its end, or at a signal, end all children. Raises what `work` raises, and as `supervise` does."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a run can be supervised from the main thread only, since it handles signals; start it there")
    number = asyncio.run(_under_signals(work, grace_s))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(128 + number)


async def _under_signals(
    work: Callable[[Children, Terminal], Coroutine[None, None, None]], grace_s: float
) -> signal.Signals | None:
    """The signal that ended the work."""
    signalled: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def note(number: signal.Signals) -> None:
        # A second signal changes nothing: all that was started gets its time to end.
        if not signalled.done():
            signalled.set_result(number)
            terminal.complain(f"{SIGNALS[number]}, stopping; what has not ended in {grace_s:g} s is killed")

    children = Children(grace_s)
    with Terminal() as terminal, _handlers(note, children.reap, terminal.resize), children:
        working = asyncio.create_task(work(children, terminal))
        telling = asyncio.create_task(terminal.keep_telling())
        try:
            first: list[asyncio.Future[Any]] = [working, signalled]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            telling.cancel()
            await asyncio.wait({working, telling})
            await children.end([child for child in children.living if child.program.role == "learner"])
            await children.end(list(children.living))
        if signalled.done() and (working.cancelled() or working.exception()):
            return signalled.result()
        await working
        return None


@contextlib.contextmanager
def _handlers(
    note: Callable[[signal.Signals], None], reap: Callable[[], None], resize: Callable[[], None]
) -> Iterator[None]:
    """Handle the signals that stop a run, unless one is ignored (nohup), a child's end, and a terminal's new size."""
    loop = asyncio.get_running_loop()
    others = {signal.SIGCHLD: reap, signal.SIGWINCH: resize}
    before = {number: signal.getsignal(number) for number in (*SIGNALS, *others)}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, note, number)
    for number, handler in others.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (*handled, *others):
            loop.remove_signal_handler(number)
            if before[number] is not None:  # None: not set from Python
                signal.signal(number, before[number])


async def _check(config: RunConfig, resume: bool, children: Children, terminal: Terminal) -> int | None:
    """Run the checks in a process of their own: they import the user's task file, whose prints, threads and libraries
    do not belong here. Returns the rows of the data set, None where they cannot be counted. Raises `ConfigError`."""
    with _scratch_file(resolved(config)) as run_file:
        child = children.start(preflight_program(config, run_file, resume), run_file.parent)
        with terminal.waiting_for("the check of run file, task and model"):
            code = await child.wait()
        answer = "\n".join(child.tail())
        await children.end([child])
    if code == WRONG_SETTING and answer:
        raise ConfigError(answer)
    if code:
        raise RunFailed(describe_end("the check before the start", code), code)
    return int(answer) if answer.isdigit() else None


@contextlib.contextmanager
def _scratch_file(text: str) -> Iterator[Path]:
    """A run file outside the run directory, which is made only once the checks have passed."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder, "run.toml")
        path.write_text(text, encoding="utf-8")
        yield path


class Keeper:
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
            if not (await self._told(routes.STATUS, http)).get(reasons.GAVE_UP):
                return
            await asyncio.sleep(GIVEN_UP_EVERY_S)

    async def _goes_on(self, http: aiohttp.ClientSession) -> bool:
        """Whether the queue says that the run is not finished."""
        return (await self._told(routes.POLICY, http)).get("finished", True) is False

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
