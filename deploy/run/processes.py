"""Starts and ends the processes of a run on one machine.

Each child has its own process group and its output in a log file. None is left behind: if this process is killed,
a guard process ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from slipstream.deploy.run.first_error import error_of_engine, first_error, follows_engine
from slipstream.deploy.servers.device_plan import DevicePlan
from slipstream.deploy.servers.devices import Placement, environment_of, nccl_environment, place_devices
from slipstream.deploy.servers.vllm_server import KEPT_PAGES, on_cpu, teacher_command
from slipstream.protocol import access
from slipstream.protocol.config import RunConfig
from slipstream.protocol.config.user_files import SAME_TERMINAL
from slipstream.rollout_worker.user_code.process_guard import ProcessGuard, signal_group
from slipstream.weight_sync.transports.staging_cores import staging_environment

# The role of a process, which is also the name of its command. A rank is one of the learner's but the first, where each
# is started by itself.
ProcessKind = Literal["preflight", "queue", "vllm", "worker", "learner", "rank"]

# -P keeps Python from importing a user's folder named `protocol` or `deploy` from the working directory.
SLIPSTREAM: tuple[str, ...] = (sys.executable, "-P", "-m", "slipstream.deploy.cli")


@dataclass(frozen=True)
class Program:
    """One process to start.

    Attributes:
        name: Name in messages, and of the log file.
        role: Its part in the run, such as learner.
        command: Command line.
        env: Variables added to this process's environment.
        cores: CPU cores it may use; empty for all.
        health: URL that answers 200 once the process is up; None if it has no such route.
        terminal: Stream that goes to the terminal; the other goes to the log.
        leaves: Whether it may leave a run that continues: a server that joined it, once it was removed.
    """

    name: str
    role: ProcessKind
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cores: Collection[int] = ()
    health: str | None = None
    terminal: Literal["stdout", "stderr"] | None = None
    leaves: bool = False


def preflight_program(config: RunConfig, run_file: Path, resume: bool) -> Program:
    """Return the program of the checks, which need their own process: they run the user's task file."""
    command = [*SLIPSTREAM, "preflight", str(run_file), *_resume(resume)]
    return Program("preflight", "preflight", command, environment_of_role(config, "preflight"), terminal="stderr")


def run_programs(config: RunConfig, run_file: Path, resume: bool, devices: DevicePlan | None = None) -> list[Program]:
    """Return all programs of a run in the order in which they are started.

    Args:
        config: The run file as read.
        run_file: The resolved run file that all processes read.
        resume: Whether the learner continues from its newest checkpoint.
        devices: Plan of the GPUs; None without GPUs.
    """
    placement = _placement(config)
    servers = {} if config.vllm.servers else config.server_names

    def program(
        name: str,
        role: ProcessKind,
        *arguments: str,
        health: str | None = None,
        terminal: Literal["stdout"] | None = None,
        command: Sequence[str] = (),
    ) -> Program:
        cores, threads = [], {}
        if placement:
            is_server = role == "vllm"
            cores = placement.servers if is_server else placement.others
            threads = {"OMP_NUM_THREADS": str(placement.server_threads if is_server else len(cores))}
            threads |= KEPT_PAGES if role == "learner" else {}
            threads |= staging_environment([*placement.servers, *placement.others]) if is_server else {}
        line = [*SLIPSTREAM, *(command or (role, str(run_file))), *arguments]
        return Program(name, role, line, environment_of_role(config, role) | threads, cores, health, terminal)

    learner = program("learner", "learner", *_resume(resume), terminal="stdout")
    seats = devices.servers if devices else ()
    on_gpus = {f"vllm-{index}": environment_of(seat) for index, seat in enumerate(seats)}
    own = environment_of(devices.learner) if devices and devices.learner else {}
    teacher = []
    if config.teacher.path is not None:
        url, seat = config.teacher_url, devices.teacher if devices else None
        own_teacher = program("teacher", "vllm", health=f"{url}/health", command=teacher_command(config))
        teacher = [_with(own_teacher, environment_of(seat) if seat else {})]
    return [
        program("queue", "queue", health=config.queue.local_url + access.HEALTH),
        *(
            _with(program(name, "vllm", "--index", str(index), health=f"{url}/health"), on_gpus.get(name, {}))
            for index, (name, url) in enumerate(servers.items())
        ),
        *teacher,
        *(program(name, "worker", "--name", name) for name in (f"worker-{i}" for i in range(config.worker.count))),
        _with(learner, {**own, **nccl_environment(config), "SLIPSTREAM_COMMAND": typed()}),
    ]


def _with(program: Program, env: Mapping[str, str]) -> Program:
    return replace(program, env={**program.env, **env})


def _placement(config: RunConfig) -> Placement | None:
    """Divide the cores on a CPU machine. None with GPUs, with servers elsewhere, and on platforms without affinity."""
    if not config.vllm.launched or not on_cpu() or not hasattr(os, "sched_setaffinity"):
        return None
    return place_devices(sorted(os.sched_getaffinity(0)), config.vllm.count + bool(config.teacher.path))


def environment_of_role(config: RunConfig, role: ProcessKind) -> dict[str, str]:
    """Return the variables of a role: its token, the queue's password of its database, and the PATH of this Python's
    environment.

    The token is never on a command line, which other users can read. Queue and servers check tokens, so they get the
    run's secret; the others run the user's code, so they get the token of their role only. vLLM finds programs such as
    ninja on PATH even if the environment is not activated.
    """
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    found = {} if programs in path.split(os.pathsep) else {"PATH": f"{programs}{os.pathsep}{path}"}
    # The check before the start looks into the store, too.
    if role in ("queue", "preflight") and (password := config.queue.store_password) is not None:
        found["PGPASSWORD"] = password
    if role == "preflight":
        found[SAME_TERMINAL] = "1"
    token = config.token if role in ("queue", "vllm") else config.token_for("worker" if role == "worker" else "learner")
    # An empty value hides the file, which holds the secret, from processes that get a role's token.
    return found | ({access.TOKEN_VARIABLE: token, access.TOKEN_FILE_VARIABLE: ""} if token else {})


def typed() -> str:
    """Return the command that was typed, for the line that says how to continue."""
    program, *arguments = sys.argv
    if Path(program).parent.name == "deploy" or Path(program).name == "slipstream":
        return shlex.join(["slipstream", *arguments])
    return shlex.join(["python", program, *arguments])


def resumes() -> str:
    """Return what continues the run: the whole command where a person typed one of ours."""
    command = typed()
    if not command.startswith("slipstream "):
        return "--resume"
    return command if "--resume" in command.split() else f"{command} --resume"


def _resume(resume: bool) -> list[str]:
    return ["--resume"] if resume else []


POLL_S = 0.05

# A process that SIGKILL does not end within this time hangs in the kernel.
KILLED_WITHIN_S = 5.0

MAX_LOG_BYTES = 256 * 1024**2

# What is kept of a longer one: its first lines, and the newest.
LOG_HEAD_BYTES, LOG_KEPT_BYTES = 64 * 1024, 16 * 1024**2

TAIL_BYTES = 64 * 1024

MAX_LINE = 2000

# Colours and other sequences that would act on a terminal.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Process(Protocol):
    """What a `Child` asks of its process: `subprocess.Popen`, or one on another machine."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, -n for signal n; None while it runs."""
        ...


class Child:
    """One process from its start to its end."""

    def __init__(self, program: Program, process: Process, log: Path, log_start: int) -> None:
        self.program = program
        self.name = program.name
        self.pid = process.pid
        self.log = log
        self._log_start = log_start
        self._process = process
        self._ended = asyncio.Event()

    def poll(self) -> int | None:
        """Return the exit code, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._ended.set()
        return 128 - code if code < 0 else code

    async def wait(self) -> int:
        """Wait until `Children.reap` has seen the end, and return the exit code."""
        await self._ended.wait()
        code = self.poll()
        assert code is not None
        return code

    def signal(self, number: int) -> bool:
        """Send a signal, 0 for none, to the process and all that it started. Returns False if none of them is left."""
        self.poll()  # a process that has ended counts until its code is read
        return signal_group(self.pid, number)

    def tail(self) -> list[str]:
        """Return the last lines of its log without control characters."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = log.read().decode(errors="replace")
            return [_CONTROL.sub("", line)[:MAX_LINE] for line in text.splitlines()]
        return []

    def bound_log(self) -> bool:
        """Drop the middle of a log beyond `MAX_LOG_BYTES`: a tool that prints fills a disk in a night.

        The process continues writing to the same file, at its end. What it writes in this moment may be lost.

        Returns:
            Whether something was dropped.
        """
        try:
            if self.log.stat().st_size <= MAX_LOG_BYTES:
                return False
            with self.log.open("rb") as log:
                first = log.read(LOG_HEAD_BYTES)
                dropped = log.seek(-LOG_KEPT_BYTES, os.SEEK_END) - len(first)
                newest = log.read()
            os.truncate(self.log, 0)
            with self.log.open("ab") as log:
                log.write(b"%b\n[%d bytes of this log were dropped here]\n%b" % (first, dropped, newest))
        except OSError:
            return False
        self._log_start = 0
        return True

    def first_error(self) -> str | None:
        """Return the first error in the last lines of its log; of a vLLM server, its engine's, wherever it stands."""
        found = first_error(self.tail())
        if found is None or not follows_engine(found):
            return found
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = (_CONTROL.sub("", line.decode(errors="replace"))[:MAX_LINE] for line in log)
            return error_of_engine(lines) or found
        return found


class Children:
    """Starts child processes and ends them, grandchildren included. Use it as a context manager.

    A guard process ends them if this process is killed.

    Args:
        grace_s: Seconds from SIGTERM to SIGKILL.
    """

    # Two SIGINT within this time are one Ctrl-C. Longer than the learner's: it must not take for one what were two.
    one_press_s = 1.0

    def __init__(self, grace_s: float) -> None:
        self.living: list[Child] = []
        self.grace_s = grace_s
        self.guard = ProcessGuard(grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.guard.close(KILLED_WITHIN_S)  # all children have ended: it has nothing to do

    def start(self, program: Program, log_dir: Path, stdout: int | None = None) -> Child:
        """Start a program.

        Args:
            program: The program.
            log_dir: Folder of the logs.
            stdout: Descriptor for a program whose stdout goes to the terminal; None for this process's.

        Raises:
            OSError: The process cannot be started, or its log cannot be written.
        """
        log_dir.mkdir(exist_ok=True)
        log = log_dir / f"{program.name}.log"
        with log.open("ab") as file, _on_cores(program.cores):
            log_start = log.stat().st_size
            process = subprocess.Popen(
                program.command,
                env={**os.environ, **program.env},
                stdin=subprocess.DEVNULL,
                stdout=stdout if program.terminal == "stdout" else file,
                stderr=None if program.terminal == "stderr" else file,
                start_new_session=True,
            )
        self.guard.add(process.pid)
        child = self._child(program, process, log, log_start)
        self.living.append(child)
        return child

    def _child(self, program: Program, process: subprocess.Popen[bytes], log: Path, log_start: int) -> Child:
        return Child(program, process, log, log_start)

    def reap(self) -> None:
        """Look which children have ended and wake their waiters. Call it on SIGCHLD."""
        for child in self.living:
            child.poll()
        self.guard.replace_if_ended()

    async def interrupt(self, children: Collection[Child]) -> None:
        """Send the children Ctrl-C, and wait for as long as they need to end. What they started may be left."""
        for child in children:
            child.signal(signal.SIGINT)
        while [child for child in children if child.poll() is None]:  # noqa: ASYNC110, one elsewhere has no SIGCHLD
            await asyncio.sleep(POLL_S)

    async def end(self, children: Collection[Child], grace_s: float | None = None) -> None:
        """End the children and all processes that they started, even those of a child that has ended itself."""
        for child in children:
            child.signal(signal.SIGTERM)
        if not await _gone(children, self.grace_s if grace_s is None else grace_s):
            for child in children:
                child.signal(signal.SIGKILL)
            await _gone(children, KILLED_WITHIN_S)
        for child in children:
            child.poll()
            if child in self.living:  # it may have been ended before
                self.living.remove(child)
                self.guard.remove(child.pid)


def describe_end(name: str, code: int) -> str:
    """Describe the end of a process by its exit code; 128 + n names signal n."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"{name} ended with code {code} ({signal.Signals(code - 128).name})"
    return f"{name} ended with code {code}"


async def _gone(children: Collection[Child], within_s: float) -> bool:
    """Wait until all processes are gone; False after `within_s`. The end of grandchildren can only be polled."""
    deadline = time.monotonic() + within_s
    while [child for child in children if child.signal(0)]:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


@contextlib.contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    """Let processes that are started meanwhile run on `cores` only: a child inherits its parent's affinity."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
