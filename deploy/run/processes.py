"""Child processes: each in a process group of its own, with its output in a log file, and none left behind.

The first error in a log: what went wrong, where everything after it only followed from it.

The processes of a run on one machine: what is started, under which name, on which cores.
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
from typing import Literal, Self

from deploy.run import watchdog
from deploy.servers.devices import DevicePlan, Placement, environment_of, nccl_environment, place_devices
from deploy.servers.vllm_server import on_cpu
from protocol import access
from protocol.config import RunConfig

_TRACEBACK = "Traceback (most recent call last):"

# A line of a log that tells of less, such as a failure that the process outlives.
_LESS = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING) ")

_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|(^|\s)[\w.]*(Error|Exception)\b:|^slipstream: ")

# What vLLM writes before each line of a traceback that it logs: process, level, time and place.
_VLLM = re.compile(r"^(\([^()]+ pid=\d+\) )?(?:\w+ \d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\] ?)?")

# What our part of a vLLM server says of its engine's end, after all that failed by it.
_ENGINE_ENDED = re.compile(r"its EngineCore process ended \([^)]*\)")

_OF_THE_ENGINE = re.compile(r"^\((EngineCore|(Vllm)?Worker)\S* pid=\d+\) ")

# Detail lines of an error that are quoted: pydantic's and others' first line says only that there is one.
_DETAILS = 2


def first_error(lines: Sequence[str]) -> str | None:
    """The first line that reports an error; of a traceback the exception it ends with, which for a chain of them is
    the root. None: no line does.

    Of a vLLM server whose engine ended it is the engine's own last word, if it had one, else that it ended."""
    if (ended := next(filter(None, map(_ENGINE_ENDED.search, lines)), None)) is not None:
        return _first_error([line for line in lines if _OF_THE_ENGINE.match(line)]) or ended.group()
    return _first_error(lines)


def _first_error(lines: Sequence[str]) -> str | None:
    for place, line in enumerate(lines):
        if _bare(line) == _TRACEBACK:
            return _end_of_traceback(lines[place:]) or line.strip()
        if _ERROR.search(line) and not _LESS.match(line):
            if line != _bare(line) and _bare(line)[:1].isspace():
                # The log's end begins within a traceback.
                return _end_of_traceback([line, *lines[place:]]) or line.strip()
            after = lines[place + 1 : place + 2]
            cause = _end_of_traceback(lines[place + 1 :]) if after and _bare(after[0]) == _TRACEBACK else None
            return cause or line.strip()
    return None


def _end_of_traceback(lines: Sequence[str]) -> str | None:
    """`lines` begin with a traceback. None: it is cut short. Other processes' lines may stand in between."""
    start = _VLLM.match(lines[0])
    process = start.group(1) if start else None
    own = [_bare(line) for line in lines[1:] if process is None or line.startswith(process)]
    for place, line in enumerate(own):
        if line and not line[0].isspace():
            details = [detail.strip() for detail in own[place + 1 : place + 1 + _DETAILS] if detail[:1].isspace()]
            return " ".join([line.strip(), *(detail for detail in details if not detail.startswith("For further"))])
    return None


def _bare(line: str) -> str:
    """Without what vLLM writes before it."""
    return _VLLM.sub("", line, count=1).rstrip()


# What a process is for, and the name of its command.
Role = Literal["preflight", "queue", "vllm", "worker", "learner"]

# -P: a folder of the user's that is called `protocol` or `deploy` is not imported from the working directory.
SLIPSTREAM: tuple[str, ...] = (sys.executable, "-P", "-m", "deploy.cli")


@dataclass(frozen=True)
class Program:
    """One process to start. `env` is added to this process's; `cores` empty: all of them.

    `health`: a URL that answers 200 once the process is up; None: it has no such route. `terminal`: the stream that
    goes to the terminal; what is not named goes to the log.
    """

    name: str
    role: Role
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cores: Collection[int] = ()
    health: str | None = None
    terminal: Literal["stdout", "stderr"] | None = None


def preflight_program(config: RunConfig, run_file: Path, resume: bool) -> Program:
    """The checks, in a process of their own: they run the user's task file."""
    command = [*SLIPSTREAM, "preflight", str(run_file), *_resume(resume)]
    return Program("preflight", "preflight", command, _environment(config, "preflight"), terminal="stderr")


def run_programs(config: RunConfig, run_file: Path, resume: bool, devices: DevicePlan | None = None) -> list[Program]:
    """All processes of the run that `run_file` describes, in the order in which they are started. devices: who gets
    which GPU, where there are any."""
    placement = _placement(config)
    servers = {} if config.vllm.servers else config.server_names

    def program(
        name: str, role: Role, *arguments: str, health: str | None = None, terminal: Literal["stdout"] | None = None
    ) -> Program:
        cores, threads = [], {}
        if placement:
            is_server = role == "vllm"
            cores = placement.servers if is_server else placement.others
            threads = {"OMP_NUM_THREADS": str(placement.server_threads if is_server else len(cores))}
        command = [*SLIPSTREAM, role, str(run_file), *arguments]
        return Program(name, role, command, _environment(config, role) | threads, cores, health, terminal)

    learner = program("learner", "learner", *_resume(resume), terminal="stdout")
    seats = devices.servers if devices else ()
    on_gpus = {f"vllm-{index}": environment_of(seat) for index, seat in enumerate(seats)}
    own = environment_of(devices.learner) if devices else {}
    return [
        program("queue", "queue", health=config.queue.url + access.HEALTH),
        *(
            _with(program(name, "vllm", "--index", str(index), health=f"{url}/health"), on_gpus.get(name, {}))
            for index, (name, url) in enumerate(servers.items())
        ),
        *(program(name, "worker", "--name", name) for name in (f"worker-{i}" for i in range(config.worker.count))),
        _with(learner, {**own, **nccl_environment(config), "SLIPSTREAM_COMMAND": _typed()}),
    ]


def _with(program: Program, env: Mapping[str, str]) -> Program:
    return replace(program, env={**program.env, **env})


def _placement(config: RunConfig) -> Placement | None:
    """None, nothing is pinned: on a GPU, with servers elsewhere, and on platforms that cannot."""
    if config.vllm.servers or not on_cpu() or not hasattr(os, "sched_setaffinity"):
        return None
    return place_devices(sorted(os.sched_getaffinity(0)), config.vllm.count)


def _environment(config: RunConfig, role: Role) -> dict[str, str]:
    """The token goes by the environment only, since other users can read a command line. Queue and servers, which check
    the others' tokens, have the run's secret; the others, which run code of the user's, the token of their role alone.
    Programs of an environment that is not activated (vLLM builds kernels with ninja) are found as in one that is."""
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    found = {} if programs in path.split(os.pathsep) else {"PATH": f"{programs}{os.pathsep}{path}"}
    token = config.token if role in ("queue", "vllm") else config.token_for("worker" if role == "worker" else "learner")
    # Empty, the file is not there for those who shall not have what it holds.
    return found | ({access.TOKEN_VARIABLE: token, access.TOKEN_FILE_VARIABLE: ""} if token else {})


def _typed() -> str:
    """What a person typed to start this, for the line that says how to go on."""
    program, *arguments = sys.argv
    if Path(program).parent.name == "deploy" or Path(program).name == "slipstream":
        return shlex.join(["slipstream", *arguments])
    return shlex.join(["python", program, *arguments])


def _resume(resume: bool) -> list[str]:
    return ["--resume"] if resume else []


POLL_S = 0.05

# What SIGKILL does not end within this time hangs in the kernel, and nobody can end it.
KILLED_WITHIN_S = 5.0

TAIL_BYTES = 64 * 1024

MAX_LINE = 400

# Colours and whatever else would act on a terminal.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Child:
    """One process from its start to its end."""

    def __init__(self, program: Program, process: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self.program = program
        self.name = program.name
        self.pid = process.pid
        self.log = log
        self._log_start = log_start
        self._process = process
        self._ended = asyncio.Event()

    def poll(self) -> int | None:
        """The exit code, 128 + n for signal n; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._ended.set()
        return 128 - code if code < 0 else code

    async def wait(self) -> int:
        """The exit code, once `Children.reap` has seen the end."""
        await self._ended.wait()
        code = self.poll()
        assert code is not None
        return code

    def signal(self, number: int) -> bool:
        """Send a signal, 0 for none, to the process and all that it started; False: none of them is left."""
        self.poll()  # a process that has ended counts until its code is read
        return watchdog.signal_group(self.pid, number)

    def tail(self) -> list[str]:
        """The end of what it has logged, fit for a terminal."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = log.read().decode(errors="replace")
            return [_CONTROL.sub("", line)[:MAX_LINE] for line in text.splitlines()]
        return []

    def first_error(self) -> str | None:
        """What its tail says went wrong first."""
        return first_error(self.tail())


class Children:
    """Starts child processes and ends them, grandchildren included; what has not ended `grace_s` after SIGTERM is
    killed. Use it as a context manager. A watchdog ends them if this process is killed outright.
    """

    def __init__(self, grace_s: float) -> None:
        self.living: list[Child] = []
        self._grace_s = grace_s

    def __enter__(self) -> Self:
        self._watchdog = self._new_watchdog()
        return self

    def _new_watchdog(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, str(self._grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        try:
            self._watchdog.wait(KILLED_WITHIN_S)  # all children have ended: it has nothing to do
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()

    def start(self, program: Program, log_dir: Path, stdout: int | None = None) -> Child:
        """`stdout`: the terminal for a program that writes to it; None: this process's. Raises `OSError` where the
        process cannot be started or its log not be written."""
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
        self._tell_watchdog(f"+{process.pid}\n")
        child = Child(program, process, log, log_start)
        self.living.append(child)
        return child

    def reap(self) -> None:
        """Look which children have ended, and wake those who wait for one: to be called on SIGCHLD."""
        for child in self.living:
            child.poll()
        if self._watchdog.poll() is not None:
            self._watchdog = self._new_watchdog()
            for child in self.living:
                self._tell_watchdog(f"+{child.pid}\n")

    async def end(self, children: Collection[Child], grace_s: float | None = None) -> None:
        """End them and all that they started. Where a child has ended already, what it left behind."""
        for child in children:
            child.signal(signal.SIGTERM)
        if not await _gone(children, self._grace_s if grace_s is None else grace_s):
            for child in children:
                child.signal(signal.SIGKILL)
            await _gone(children, KILLED_WITHIN_S)
        for child in children:
            child.poll()
            self.living.remove(child)
            self._tell_watchdog(f"-{child.pid}\n")

    def _tell_watchdog(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; `reap` starts a new one
            self._watchdog.stdin.write(line.encode())


def describe_end(name: str, code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"{name} ended with code {code} ({signal.Signals(code - 128).name})"
    return f"{name} ended with code {code}"


async def _gone(children: Collection[Child], within_s: float) -> bool:
    """Grandchildren are not ours to wait for: their end can only be polled."""
    deadline = time.monotonic() + within_s
    while [child for child in children if child.signal(0)]:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


@contextlib.contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    """What is started meanwhile runs on `cores`; a child keeps its parent's affinity."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
