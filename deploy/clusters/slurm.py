"""Runs a run in one SLURM job: a heterogeneous one, of the head, the servers and the workers.

`slipstream up run.toml --on slurm` submits the job and follows it. In the job the same command supervises: queue and
learner are its children on the first node, servers and workers are steps (`srun`) on theirs. Two minutes before the
time limit SLURM sends SIGTERM, the learner writes a checkpoint, and the job waits in the queue again. Tokens are in
files of the run directory that only their owner may read.

Run directory, task, model and this Python's environment are on a file system that all nodes see.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.clusters.roles import (
    RELEASE,
    Node,
    Part,
    Parts,
    Resources,
    check_fits,
    check_room,
    check_token,
    node_of,
    on_nodes,
    programs,
    server_arguments,
)
from deploy.clusters.stops import Stops
from deploy.run import run_directory
from deploy.run.process_keeper import RunFailed
from deploy.run.processes import SLIPSTREAM, Child, Children, Program
from protocol import access
from protocol.config import ConfigError, RunConfig
from protocol.config.fingerprint import release
from rollout_queue.store import open_for_reading

# Seconds before the time limit at which SLURM sends SIGTERM, for the learner's last checkpoint.
NOTICE_S = 120

# Time-out of one of SLURM's commands.
COMMAND_S = 60.0

FOLLOW_EVERY_S = 2.0

# Seconds beyond deploy.grace_s until a job that was told to stop is cancelled.
MARGIN_S = 30.0

# Seconds after which a job that does not stop is told again: a batch script that has only begun misses the signal.
AGAIN_S = 3.0

# Seconds without an answer of SLURM after which the command gives up; the job goes on.
SILENT_S = 300.0

# The same for what the job itself asks, whose time may be over soon.
SILENT_IN_JOB_S = 60.0

# States of a job that has ended, as squeue and scontrol spell them.
WAITS_OR_RUNS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "RESIZING", "STAGE_OUT")

# Of a job that ended more than MinJobAge seconds ago.
FORGOTTEN = "FORGOTTEN"

QUEUE_URL = "queue.url"

TOKENS = "tokens"


def in_job() -> bool:
    """Tell whether this process is the batch script of a job that `script` made."""
    return "SLURM_JOB_ID" in os.environ and os.environ.get("SLIPSTREAM_IN_JOB") == os.environ["SLURM_JOB_ID"]


def to_resume(config: RunConfig, resume: bool) -> bool:
    """Tell whether the run goes on: because it was asked to, or since SLURM starts its job again."""
    if resume or int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
        return resume
    return run_directory.has_checkpoint(config) or open_for_reading(config).run_state().version > 0


# Scripts.


def script(config: RunConfig, run_file: str, settings: Sequence[str], resume: bool) -> str:
    """Return the batch script of a run.

    Args:
        config: The run file.
        run_file: Its path.
        settings: Settings of the command line, as `--worker.count 4`.
        resume: Whether the run goes on from its newest checkpoint.
    """
    parts = Parts.of(config).needs()
    _check_time_limit(config)
    # Not deploy.cli, which Ctrl-C would end with a traceback while it imports.
    python = [*SLIPSTREAM[:-1], "deploy"]
    words = [*python, "up", run_file, "--on", "slurm", *settings, *(["--resume"] if resume else [])]
    lines = ["#!/bin/bash", *_options(config, f"slipstream-{config.run.name}", "slurm-%j.log", NOTICE_S)]
    for place, (part, needed, count) in enumerate(parts):
        lines += ["#SBATCH hetjob"] if place else []
        lines += _asked(config, part, needed, count)
    lines += [*_environment(config, "secret"), 'export SLIPSTREAM_IN_JOB="$SLURM_JOB_ID"']
    return "\n".join([*lines, f"exec {shlex.join(words)}\n"])


def array(config: RunConfig, part: Part, count: int) -> str:
    """Return the script of an array of `count` workers, or servers, that join the run and leave by draining.

    Each reads the queue's URL as it starts, from the run directory.
    """
    parts, folder = Parts.of(config), _folder(config)
    needed = parts.worker if part == "worker" else parts.server
    name = f"slipstream-{config.run.name}-{part}s"
    lines = ["#!/bin/bash", *_options(config, name, f"slurm-{part}-%A-%a.log", 60)]
    lines += [f"#SBATCH --array=0-{count - 1}", *_asked(config, part, needed, 1)]
    url, place = f'"$(cat {shlex.quote(str(folder / QUEUE_URL))})"', '"$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"'
    command = shlex.join([*SLIPSTREAM, "worker" if part == "worker" else "vllm", str(folder / "run.toml")])
    if part == "worker":
        words = f"{command} --queue {url} --name worker-{place}"
    else:
        port = f"$(({config.vllm.port + 64} + SLURM_ARRAY_TASK_ID))"
        words = f"{command} {' '.join(server_arguments(url, port, f'vllm-{place}'))}"
    return "\n".join([*lines, *_environment(config, "worker" if part == "worker" else "secret"), f"exec {words}\n"])


def _folder(config: RunConfig) -> Path:
    return config.run_dir.absolute()


def _check_time_limit(config: RunConfig) -> None:
    """Raise `ConfigError` for a limit at whose notice the run has made no step: it would be queued again for ever."""
    limit = config.cluster.time_limit
    if limit is None:
        return
    days, _, clock = limit.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    if days or len(numbers) == 3:  # after the days come hours, else minutes are the first of two
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    if int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds <= NOTICE_S:
        raise ConfigError(
            f"cluster.time_limit = {limit}: the learner is told to end {NOTICE_S} s before the limit, so that the run "
            f"would make no step; take more, as 1:00:00 for an hour"
        )


def _options(config: RunConfig, name: str, log: str, notice_s: int) -> list[str]:
    """Return the options of the whole job. `log`: name of its log, in which SLURM replaces what begins with %."""
    cluster = config.cluster
    logs = str(_quotable(_folder(config) / "logs")).replace("%", "%%")
    return [
        f"#SBATCH --job-name={name}",
        f'#SBATCH --output="{logs}/{log}"',
        f'#SBATCH --chdir="{_quotable(Path.cwd())}"',
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=B:TERM@{notice_s}",
        f"#SBATCH --{'' if cluster.requeue else 'no-'}requeue",
    ]


def _quotable(path: Path) -> Path:
    """Return a path that can stand between quotes in an #SBATCH line. Raises `ConfigError` for another."""
    if any(character in str(path) for character in '"\\\n\r'):
        raise ConfigError(
            f"--on slurm: the path {str(path)!r} cannot stand in a batch script: take a run.dir and working directory "
            f"without quotes, backslashes and line breaks"
        )
    return path


def _word(option: str) -> str:
    """Return an option of sbatch as one word of a line. A value that is quoted already stays as it is."""
    name, _, value = option.partition("=")
    if re.fullmatch(r"""(["']).*\1""", value) or not re.search(r"""[\s#"'\\]""", value):
        return option
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}="{escaped}"'


def _asked(config: RunConfig, part: Part, needed: Resources, count: int) -> list[str]:
    cluster = config.cluster
    partition = (cluster.worker_partition if part == "worker" else None) or cluster.partition
    options = [f"--ntasks={count}", f"--cpus-per-task={needed.cpus}"]
    options += [f"--nodes={count}", "--ntasks-per-node=1"] if part == "head" and count > 1 else []
    options += [f"--gpus-per-task={needed.gpus}"] if needed.gpus else []
    options += [f"--mem-per-cpu={math.ceil(needed.memory_gb * 1024 / needed.cpus)}M"] if needed.memory_gb else []
    options += [f"--partition={partition}"] if partition else []
    options += [f"--time={cluster.time_limit}"] if cluster.time_limit else []
    return [f"#SBATCH {' '.join([*options, *map(_word, cluster.sbatch)])}"]


def _environment(config: RunConfig, token: str) -> list[str]:
    file = shlex.quote(str(_folder(config) / TOKENS / token))
    return ["", f"export {access.TOKEN_FILE_VARIABLE}={file}", f"export {RELEASE}={release()}"]


# Checks, which come before anything is placed.


def check(config: RunConfig) -> None:
    """Check that the cluster is there and has nodes for each part.

    Raises:
        ConfigError: With the value and the remedy.
    """
    check_token(config)
    if shutil.which("sbatch") is None:
        raise ConfigError("--on slurm: there is no sbatch on PATH; run it on a login node of the cluster")
    try:
        found = _slurm("sinfo", "--noheader", "--Node", "--format=%R|%N|%c|%m|%G|%T")
    except RunFailed as error:
        raise ConfigError(f"--on slurm: the cluster does not answer: {error}; ask its operators") from None
    partitions: dict[str, list[Node]] = {}
    every: dict[str, list[Node]] = {}
    for line in found.splitlines():
        named, name, cpus, megabytes, gres, state = line.split("|")
        node = Node(name, _gpus(gres), int(cpus), int(megabytes) / 1024)
        every.setdefault(named, []).append(node)
        partitions.setdefault(named, [])
        if not state.startswith(("down", "drain", "fail", "inval")):
            partitions[named].append(node)
    default = _default_partition()
    asked: dict[str, list[tuple[Part, Resources, int]]] = {}
    for part, needed, count in Parts.of(config).needs():
        setting = "worker_partition" if part == "worker" and config.cluster.worker_partition else "partition"
        partition: str | None = getattr(config.cluster, setting) or default
        if partition is None:
            raise ConfigError(f"cluster.partition is not set, and the cluster has no default: {_named(partitions)}")
        if partition not in partitions:
            raise ConfigError(f"cluster.{setting} = {partition}: there is no such partition; {_named(partitions)}")
        if not partitions[partition]:
            raise ConfigError(f"cluster.{setting} = {partition}: none of its nodes is up; name another partition")
        check_fits(part, needed, partitions[partition], f"partition {partition}")
        asked.setdefault(partition, []).append((part, needed, count))
    for partition, needs in asked.items():
        # A node that is down may come back, but the job would wait for ever for what is not there.
        check_room(needs, every[partition], f"partition {partition}", "or name another partition")


def _named(partitions: Mapping[str, object]) -> str:
    return f"the partitions are: {', '.join(sorted(partitions)) or 'none'}"


def _default_partition() -> str | None:
    names = _slurm("sinfo", "--noheader", "--format=%P").split()
    return next((name.removesuffix("*") for name in names if name.endswith("*")), None)


def _gpus(gres: str) -> int:
    """Read the number of GPUs of a node, as in gpu:a100:8(S:0-1),nvme:1."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


# How SLURM's commands are run: in a group of their own, which Ctrl-C of the terminal does not reach.
_APART: Mapping[str, Any] = {"capture_output": True, "text": True, "timeout": COMMAND_S, "process_group": 0}


def _slurm(*command: str) -> str:
    """Return the output of one of SLURM's commands. Raises `RunFailed` with its own words."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, **_APART, env=_without_token())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunFailed(f"{command[0]}: {error}") from None
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"ended with code {done.returncode}"
        raise RunFailed(words if words.startswith(command[0]) else f"{command[0]}: {words}")
    return str(done.stdout)


def _without_token() -> dict[str, str]:
    return access.environment_without_token(os.environ)


# The job, seen from outside.


def write_tokens(config: RunConfig) -> None:
    """Write the run's secret and the workers' token into files that only their owner may read.

    Raises:
        ConfigError: The run is on with another secret, which its processes read as they are started again.
    """
    folder = _folder(config) / TOKENS
    with contextlib.suppress(FileNotFoundError):
        if (folder / "secret").read_text() != f"{config.token}\n":
            try:
                run_directory.check_unused(config)
            except ConfigError:
                raise ConfigError(
                    f"{access.TOKEN_VARIABLE}: run {config.run.name} is on with another secret than the one here; "
                    f"set that, or stop the run"
                ) from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, token in {"secret": config.token, "worker": config.token_for("worker")}.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            file.write(f"{token}\n")


def submit_and_follow(config: RunConfig, run_file: str, settings: Sequence[str], resume: bool) -> None:
    """Submit the job of a run, show its log, and wait until it has ended. Ctrl-C and SIGTERM stop it.

    Raises:
        ConfigError: SLURM refuses the job; nothing was placed.
        RunFailed: The run failed; its code.
        KeyboardInterrupt: Ctrl-C. SystemExit: SIGTERM.
    """
    check(config)
    run_directory.check_run_directory(config, resume)
    run_directory.check_unused(config)
    text = script(config, run_file, settings, resume)
    write_tokens(config)
    logs = _folder(config) / "logs"
    logs.mkdir(exist_ok=True)
    with Stops() as stops:  # from here on, so that none comes between the job's submission and its number
        number = submit(text)
        _Job(number, logs / f"slurm-{number}.log", config).follow(stops)


def submit(text: str) -> str:
    """Submit a batch script and return the job's number. Raises `ConfigError` if SLURM refuses it."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, **_APART, env=_without_token())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--on slurm: sbatch: {error}") from None
    if done.returncode:
        raise ConfigError(f"--on slurm: SLURM refuses the job: {' '.join(done.stderr.split())}")
    return str(done.stdout).split(";")[0].strip()


class _Job:
    """A job as the command follows it: it prints the log, and each change of state."""

    def __init__(self, number: str, log: Path, config: RunConfig) -> None:
        self._number = number
        self._log = log
        self._config = config
        self._read = 0
        self._state, self._shown = "PENDING", ""
        self._answered = time.monotonic()
        self._silent = False

    def follow(self, stops: Stops) -> None:
        """Return when the job has completed. Raises as `submit_and_follow`."""
        print(f"submitted job {self._number}, log in {self._log}", flush=True)
        while (state := self._look()).startswith(WAITS_OR_RUNS):
            if (signalled := stops.wait(FOLLOW_EVERY_S)) is not None:
                self._stop(signalled)
        if state == FORGOTTEN and not open_for_reading(self._config).run_state().finished:
            raise RunFailed(f"SLURM has forgotten job {self._number}, which ended a while ago; its log: {self._log}")
        if not state.startswith(("COMPLETED", FORGOTTEN)):
            code = self._code()
            raise RunFailed(f"job {self._number} ended as {state.lower()} with code {code}; its log: {self._log}", code)

    def _look(self) -> str:
        """Show what is new, and return the job's state: the last one known while SLURM does not answer."""
        self._show_log()
        try:
            fields = _job(self._number)
        except RunFailed as error:
            if time.monotonic() - self._answered > SILENT_S:
                raise RunFailed(
                    f"SLURM has not answered for {SILENT_S:g} s: {error}; job {self._number} goes on, its log: "
                    f"{self._log}"
                ) from None
            if not self._silent:
                print(f"job {self._number}: SLURM does not answer, asking again: {error}", file=sys.stderr, flush=True)
            self._silent = True
            return self._state
        if self._silent:
            print(f"job {self._number}: SLURM answers again", file=sys.stderr, flush=True)
        self._answered, self._silent = time.monotonic(), False
        state, reason = fields.get("JobState", FORGOTTEN), fields.get("Reason", "None")
        shown = state if reason == "None" else f"{state} ({reason})"
        if shown != self._shown and state in ("PENDING", "RUNNING"):
            print(f"job {self._number}: {shown}", file=sys.stderr, flush=True)
        self._state, self._shown = state, shown
        return state

    def _code(self) -> int:
        try:
            code, _, number = _job(self._number).get("ExitCode", "1:0").partition(":")
        except RunFailed:
            return 1
        return int(code) or (128 + int(number) if int(number or 0) else 1)

    def _show_log(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
            self._read += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()

    def _stop(self, number: signal.Signals) -> None:
        """Stop the job as Ctrl-C would stop the run, and cancel what is left of it."""
        print(f"stopping job {self._number}", file=sys.stderr, flush=True)
        # SIGTERM is what SLURM itself sends at the time limit, after which the job is queued again.
        interrupt = ("scancel", "--batch", "--signal=INT", self._number)
        self._end_by(interrupt, ("RUNNING",), self._config.deploy.grace_s + MARGIN_S)
        if self._end_by(("scancel", self._number), WAITS_OR_RUNS, MARGIN_S):
            print(f"job {self._number} has not ended: scancel {self._number}", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _end_by(self, command: Sequence[str], states: tuple[str, ...], seconds: float) -> bool:
        """Run `command` while the job is in one of `states`, repeatedly. Returns whether it still is at the end."""
        deadline, again = time.monotonic() + seconds, 0.0
        while self._look().startswith(states):
            if time.monotonic() > deadline:
                return True
            if time.monotonic() > again:
                with contextlib.suppress(RunFailed):
                    _slurm(*command)
                again = time.monotonic() + AGAIN_S
            time.sleep(0.5)
        return False


def _job(number: str) -> dict[str, str]:
    """Return what SLURM says of a job, {} once it has forgotten it. A job has ended once all its components have."""
    try:
        text = _slurm("scontrol", "--oneliner", "show", "job", number)
    except RunFailed as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    first, *others = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines())
    if any(other.get("JobState", "").startswith(WAITS_OR_RUNS) for other in others):
        return first if first["JobState"].startswith(WAITS_OR_RUNS) else {**first, "JobState": "COMPLETING"}
    return first


def _patiently(*command: str) -> str:
    """Return the output of one of SLURM's commands, which is asked again while SLURM does not answer."""
    deadline = time.monotonic() + SILENT_IN_JOB_S
    while True:
        try:
            return _slurm(*command)
        except RunFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(FOLLOW_EVERY_S)


# The job, seen from inside.


class SlurmJob:
    """The engine within a job: servers and workers are steps on the nodes that the job has."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._servers = 0
        self._parts: list[tuple[Part, Resources, int]] = []
        self._folder = Path()
        self._places: dict[int, list[str]] = {}

    def children(self, grace_s: float) -> Children:
        return SlurmSteps(grace_s, self)

    async def settle(self, config: RunConfig, say: Callable[[str], None]) -> RunConfig:
        self._servers, self._parts, self._folder = config.vllm.launched, Parts.of(config).needs(), _folder(config)
        head = await asyncio.to_thread(_address, self._environment["SLURMD_NODENAME"])
        for group in range(len(self._parts)):  # now, as a restart must not depend on SLURM's answer
            await asyncio.to_thread(self._nodes, group)
        settled = on_nodes(config, head)
        (self._folder / QUEUE_URL).write_text(f"{settled.queue.address}\n", encoding="utf-8")
        return settled

    def queue_url(self, config: RunConfig) -> str:
        return config.queue.address

    def programs(self, config: RunConfig, run_file: Path, resume: bool) -> list[Program]:
        return programs(config, run_file, resume, self._servers)

    def as_step(self, program: Program) -> Program:
        """Return the program as a step of the job, on the node that its place in the run file gives it.

        A restarted server thereby keeps its address.
        """
        part, group, needed = self._part_of(program)
        place = node_of(program) if part == "head" else int(program.name.rpartition("-")[2])
        # A rank has its part of its node.
        steps = int(program.env["LOCAL_WORLD_SIZE"]) if part == "head" else 1
        options = [
            *("srun", *([f"--het-group={group}"] if len(self._parts) > 1 else [])),
            *("--ntasks=1", "--nodes=1", "--exact"),
            *(f"--nodelist={self._nodes(group)[place]}", f"--job-name={program.name}"),
            *("--kill-on-bad-exit=0", f"--cpus-per-task={max(1, needed.cpus // steps)}"),
            *([f"--gpus-per-task={needed.gpus // steps}"] if needed.gpus >= steps else []),
        ]
        file = self._folder / TOKENS / ("worker" if part == "worker" else "secret")
        token = {access.TOKEN_VARIABLE: "", access.TOKEN_FILE_VARIABLE: str(file)}
        return replace(program, command=[*options, *program.command], env={**program.env, **token})

    def job_of(self, program: Program) -> str:
        """Return the number of the component that a step belongs to."""
        return self._of_group("SLURM_JOB_ID", self._part_of(program)[1])

    def _part_of(self, program: Program) -> tuple[Part, int, Resources]:
        """Return a step's part, the number of its component, and what one of the part needs."""
        part: Part = "server" if program.role == "vllm" else "worker" if program.role == "worker" else "head"
        group = next(place for place, (each, _, _) in enumerate(self._parts) if each == part)
        return part, group, self._parts[group][1]

    def _of_group(self, name: str, group: int) -> str:
        """Return a variable of one component; a job of one component is an ordinary job."""
        return self._environment[f"{name}_HET_GROUP_{group}" if len(self._parts) > 1 else name]

    def _nodes(self, group: int) -> list[str]:
        """Return the node of each task of a component."""
        if group not in self._places:
            names = _patiently("scontrol", "show", "hostnames", self._of_group("SLURM_JOB_NODELIST", group)).split()
            tasks = counts(self._of_group("SLURM_TASKS_PER_NODE", group))
            self._places[group] = [node for node, count in zip(names, tasks, strict=True) for _ in range(count)]
        return self._places[group]


def counts(text: str) -> list[int]:
    """Read SLURM's tasks per node, as in 2(x3),1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _address(node: str) -> str:
    """Return the address by which SLURM itself reaches a node."""
    text = _patiently("scontrol", "--oneliner", "show", "node", node)
    found = re.search(r"NodeAddr=(\S+)", text)
    return found[1] if found else node


class SlurmSteps(Children):
    """Starts queue and learner here, servers, workers and ranks on other nodes as steps."""

    def __init__(self, grace_s: float, job: SlurmJob) -> None:
        super().__init__(grace_s)
        self._job = job

    def start(self, program: Program, log_dir: Path, stdout: int | None = None) -> Child:
        if not _is_step(program):
            return super().start(program, log_dir, stdout)
        return super().start(self._job.as_step(program), log_dir, stdout)

    def _child(self, program: Program, process: subprocess.Popen[bytes], log: Path, log_start: int) -> Child:
        if not _is_step(program):
            return super()._child(program, process, log, log_start)
        return _Step(program, process, log, log_start, self._job.job_of(program))


def _is_step(program: Program) -> bool:
    return program.role in ("vllm", "worker") or node_of(program) > 0


class _Step(Child):
    """A step of the job, with its `srun` as the process here."""

    def __init__(self, program: Program, process: subprocess.Popen[bytes], log: Path, log_start: int, job: str) -> None:
        super().__init__(program, process, log, log_start)
        self._job = job

    def signal(self, number: int) -> bool:
        # srun answers SIGTERM by killing its step; the step itself is to get it, so that it drains.
        if number != signal.SIGTERM:
            return super().signal(signal.SIGTERM if number == signal.SIGKILL else number)
        subprocess.Popen(
            ["sh", "-c", _SIGNAL_STEP, "sh", self._job, self.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_without_token(),
        )
        return super().signal(0)


_SIGNAL_STEP = """again=0
until steps=$(squeue --noheader --steps --jobs="$1" --format="%i %j"); do
  [ $((again += 1)) -lt 20 ] || exit
  sleep 1
done
echo "$steps" | while read -r step name; do [ "$name" = "$2" ] && scancel --signal=TERM "$step"; done"""


def requeue() -> None:
    """Let the job wait for its turn again. SLURM ends what is left of it.

    One that was cancelled is not running any more and stays cancelled; one that its operators have queued again waits
    already.
    """
    number, deadline = os.environ["SLURM_JOB_ID"], time.monotonic() + SILENT_IN_JOB_S
    while True:
        try:
            if _job(number).get("JobState") == "RUNNING":
                _slurm("scontrol", "requeue", number)
            return
        except RunFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(FOLLOW_EVERY_S)
