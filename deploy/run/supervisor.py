"""Runs a whole run on one machine: checks, starts, watches, restarts and stops its processes.

Nothing is left running, however the run ends. Each child has its own process group, which gets SIGTERM and, after
`deploy.grace_s`, SIGKILL; a guard process does it if the supervisor is killed. The learner is ended first, so that the
queue still takes its last report. After Ctrl-C it gets SIGINT and all the time that it needs for its checkpoint; a
second Ctrl-C gives that up, and SIGTERM sets the limit of `deploy.grace_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from slipstream.deploy.run import run_directory
from slipstream.deploy.run.engine import Engine, ThisMachine
from slipstream.deploy.run.process_keeper import WRONG_SETTING, ProcessKeeper, RestartPolicy, RunFailed
from slipstream.deploy.run.processes import Child, Children, describe_end, preflight_program, resumes
from slipstream.deploy.run.run_directory import (
    check_unused,
    clear,
    finished,
    held_alone,
    kept_if_no_step_is_made,
    resolved,
    to_go_on,
    write_resolved,
)
from slipstream.deploy.run.terminal import Terminal
from slipstream.learner.ranks.stopping import Requests
from slipstream.protocol import access, checkpoints
from slipstream.protocol.config import ConfigError, Finding, RunConfig

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

# A server holds nothing to save, and one whose engine has ended as it loaded never ends by itself.
SERVERS_GRACE_S = 5.0

# For a process to close its files after a second Ctrl-C.
GIVEN_UP_GRACE_S = 1.0


def supervise(config: RunConfig, resume: bool = False, engine: Engine | None = None) -> None:
    """Run everything until the learner has made its last step. Every process has ended when this returns or raises.

    Args:
        config: The run file.
        resume: Whether to continue from the newest checkpoint; a run that has made its last step is left as it is.
        engine: Where its processes are placed; None: on this machine.

    Raises:
        ConfigError: A setting is wrong; nothing was started.
        RunFailed: The run ended for another reason.
        KeyboardInterrupt: Ctrl-C.
        SystemExit: With 143 or 129, on SIGTERM or SIGHUP.
    """
    place = ThisMachine() if engine is None else engine

    async def work(children: Children, terminal: Terminal) -> None:
        check_unused(config)
        checked = await _check(config, resume, children, terminal)
        counted = run_directory.with_steps_for_epochs(config, checked.rows)
        if resume and (made := finished(counted)) is not None:
            terminal.say(checkpoints.nothing_to_do(config.run.name, made, counted.learner.steps))
            return
        counted = await place.settle(counted, terminal.say, checked.episode_tokens)
        with held_alone(config):
            if not resume and (aside := clear(config)):
                terminal.say(f"an earlier start made no step; its files are in {aside}")
            if resume:
                settings.enter_context(kept_if_no_step_is_made(config))
            run_file = write_resolved(counted).absolute()
            url = place.queue_url(counted)
            terminal.say(f"run directory {run_file.parent}, page at {url}/, status at {url}{access.STATUS}")
            if checked.rows is not None and config.learner.epochs is not None:
                terminal.say(run_directory.describe_steps(config, checked.rows))
            policy = RestartPolicy(config.deploy.restart, lambda: to_go_on(config, resumes()))
            keeper = ProcessKeeper(counted, children, policy, run_file.parent / "logs", terminal)
            await keeper.keep(place.programs(counted, run_file, resume))

    with contextlib.ExitStack() as settings:  # until all have ended: the learner may make a step as it stops
        under_signals(work, place.children(config.deploy.grace_s))


def under_signals(work: Callable[[Children, Terminal], Coroutine[None, None, None]], children: Children) -> None:
    """Run `work`, and end all children when it ends or at a signal.

    Raises what `work` raises, and for signals what `supervise` raises.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a run can be supervised from the main thread only, since it handles signals; start it there")
    number = asyncio.run(_under_signals(work, children))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(128 + number)


async def _under_signals(
    work: Callable[[Children, Terminal], Coroutine[None, None, None]], children: Children
) -> signal.Signals | None:
    """Return the signal that ended the work, None if it ended by itself."""
    signalled: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    limited, given_up = asyncio.Event(), asyncio.Event()
    requests = Requests(children.one_press_s)

    def learners() -> list[Child]:
        return [child for child in children.living if child.program.role == "learner"]

    def note(number: signal.Signals) -> None:
        killed = f"what has not ended in {children.grace_s:g} s is killed"
        match requests.take(number, time.monotonic()):
            case "stop":
                signalled.set_result(number)
                waits = number == signal.SIGINT and learners()
                terminal.complain(
                    f"{SIGNALS[number]}, stopping; "
                    + ("the learner saves its steps first, Ctrl-C again gives that up" if waits else killed)
                )
            case "limit":
                limited.set()
                terminal.complain(f"{SIGNALS[number]}; {killed}")
            case "give up":
                given_up.set()
                terminal.complain("interrupted again, ending at once; a checkpoint that is not complete is given up")
            case None:
                pass

    async def end() -> None:
        if signalled.done() and signalled.result() == signal.SIGINT:
            await _first_of(children.interrupt(learners()), limited.wait())
        await children.end(learners())
        servers = [child for child in children.living if child.program.role == "vllm"]
        others = [child for child in children.living if child not in servers]
        await asyncio.gather(children.end(servers, min(SERVERS_GRACE_S, children.grace_s)), children.end(others))

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
            await _first_of(end(), given_up.wait())
            # The second one that the learner gets: it says what it leaves.
            await _first_of(children.interrupt(learners()), asyncio.sleep(GIVEN_UP_GRACE_S))
            await children.end(list(children.living), GIVEN_UP_GRACE_S)
        if signalled.done() and (working.cancelled() or working.exception()):
            return signalled.result()
        await working
        return None


async def _first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done, and cancel the others."""
    tasks = {asyncio.create_task(work) for work in works}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextlib.contextmanager
def _handlers(
    note: Callable[[signal.Signals], None], reap: Callable[[], None], resize: Callable[[], None]
) -> Iterator[None]:
    """Handle signals that stop a run (unless ignored, as under nohup), a child's end and a new terminal size."""
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


class _Checked(msgspec.Struct):
    """What the checks have measured and found, see `slipstream.deploy.checks.preflight.RunCheck`."""

    rows: int | None = None
    episode_tokens: int | None = None
    findings: list[Finding] = []


async def _check(config: RunConfig, resume: bool, children: Children, terminal: Terminal) -> _Checked:
    """Run the checks in their own process: they import the user's task file, whose prints, threads and libraries
    do not belong in the supervisor.

    Raises:
        ConfigError: The checks found a fault that stops the run.
        RunFailed: The process of the checks failed.
    """
    # The checks choose the type as the start does after them.
    left_open = () if "dtype" in config.model.model_fields_set else (("model", "dtype"),)
    with _scratch_file(resolved(config, left_open)) as run_file:
        child = children.start(preflight_program(config, run_file, resume), run_file.parent)
        with terminal.waiting_for("the check of run file, task and model"):
            code = await child.wait()
        answer = "\n".join(child.tail())
        await children.end([child])
    if code == WRONG_SETTING and answer:
        raise ConfigError(answer)
    if code:
        raise RunFailed(describe_end("the check before the start", code), code)
    checked = msgspec.json.decode(answer, type=_Checked) if answer else _Checked()
    for finding in checked.findings:
        terminal.complain(f"{finding.severity}: {finding}")
    return checked


@contextlib.contextmanager
def _scratch_file(text: str) -> Iterator[Path]:
    """Write a run file outside the run directory, which is created only after the checks have passed."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        path = Path(folder, "run.toml")
        path.write_text(text, encoding="utf-8")
        yield path
