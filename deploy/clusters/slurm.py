"""Runs a run in one SLURM job: a heterogeneous one, of the head, the servers and the workers.

`slipstream up run.toml --on slurm` submits the job and follows it. In the job the same command supervises: queue and
learner are its children on the first node, servers and workers are steps (`srun`) on theirs. Two minutes before the
time limit SLURM sends SIGTERM, the learner writes a checkpoint, and the job waits in the queue again. Tokens are in
files of the run directory that only their owner may read.

Run directory, task, model and this Python's environment are on a file system that all nodes see.
"""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.deploy.clusters.following import Silence, Stops
from slipstream.deploy.clusters.roles import (
    RELEASE,
    Node,
    Part,
    Parts,
    Resources,
    check_fits,
    check_room,
    check_token,
    server_arguments,
)
from slipstream.deploy.run import run_directory
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.deploy.run.processes import SLIPSTREAM
from slipstream.protocol import access
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.fingerprint import release
from slipstream.rollout_queue.store import open_for_reading

# Seconds before the time limit at which SLURM sends SIGTERM, for the learner's last checkpoint.
NOTICE_S = 120

# Time-out of one of SLURM's commands.
COMMAND_S = 60.0

FOLLOW_EVERY_S = 2.0

# Seconds beyond deploy.grace_s until a job that was told to stop is cancelled.
MARGIN_S = 30.0

# Seconds after which a job that does not stop is told again: a batch script that has only begun misses the signal.
AGAIN_S = 3.0

# Seconds without an answer of SLURM after which the command gives up; the job continues.
SILENT_S = 300.0

# States of a job that has ended, as squeue and scontrol spell them.
WAITS_OR_RUNS = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "RESIZING", "STAGE_OUT")

# Of a job that ended more than MinJobAge seconds ago.
FORGOTTEN = "FORGOTTEN"

QUEUE_URL = "queue.url"

TOKENS = "tokens"


def script(config: RunConfig, run_file: str, settings: Sequence[str], resume: bool) -> str:
    """Return the batch script of a run.

    Args:
        config: The run file.
        run_file: Its path.
        settings: Settings of the command line, as `--worker.count 4`.
        resume: Whether the run continues from its newest checkpoint.
    """
    parts = Parts.of(config).needs()
    _check_time_limit(config)
    # Not slipstream.deploy.cli, which Ctrl-C would end with a traceback while it imports.
    python = [*SLIPSTREAM[:-1], "slipstream.deploy"]
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
    parts, folder = Parts.of(config), folder_of(config)
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


def folder_of(config: RunConfig) -> Path:
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
    logs = str(_quotable(folder_of(config) / "logs")).replace("%", "%%")
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
    file = shlex.quote(str(folder_of(config) / TOKENS / token))
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
        found = ask("sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%m|%G|%T")
    except RunFailed as error:
        raise ConfigError(f"--on slurm: the cluster does not answer: {error}; ask its operators") from None
    default: str | None = None
    every: dict[str, list[Node]] = {}
    up: dict[str, list[Node]] = {}
    for line in found.splitlines():
        named, name, cpus, megabytes, gres, state = line.split("|")
        node = Node(name, _gpus(gres), int(cpus), int(megabytes) / 1024)
        partition = named.removesuffix("*")  # a star marks the default
        default = partition if named != partition else default
        every.setdefault(partition, []).append(node)
        if not state.startswith(("down", "drain", "fail", "inval")):
            up.setdefault(partition, []).append(node)
    known = f"the partitions are: {', '.join(sorted(every)) or 'none'}"
    asked: dict[str, list[tuple[Part, Resources, int]]] = {}
    for part, needed, count in Parts.of(config).needs():
        setting = "worker_partition" if part == "worker" and config.cluster.worker_partition else "partition"
        wanted: str | None = getattr(config.cluster, setting) or default
        if wanted is None:
            raise ConfigError(f"cluster.partition is not set, and the cluster has no default: {known}")
        if wanted not in every:
            raise ConfigError(f"cluster.{setting} = {wanted}: there is no such partition; {known}")
        if wanted not in up:
            raise ConfigError(f"cluster.{setting} = {wanted}: none of its nodes is up; name another partition")
        check_fits(part, needed, up[wanted], f"partition {wanted}")
        asked.setdefault(wanted, []).append((part, needed, count))
    for partition, needs in asked.items():
        # A node that is down may come back, but the job would wait for ever for what is not there.
        check_room(needs, every[partition], f"partition {partition}", "or name another partition")


def _gpus(gres: str) -> int:
    """Read the number of GPUs of a node, as in gpu:a100:8(S:0-1),nvme:1."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


# How SLURM's commands are run: in their own group, which Ctrl-C of the terminal does not reach.
_APART: Mapping[str, Any] = {"capture_output": True, "text": True, "timeout": COMMAND_S, "process_group": 0}


def ask(*command: str) -> str:
    """Return the output of one of SLURM's commands. Raises `RunFailed` with its own words."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, **_APART, env=without_token())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunFailed(f"{command[0]}: {error}") from None
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"ended with code {done.returncode}"
        raise RunFailed(words if words.startswith(command[0]) else f"{command[0]}: {words}")
    return str(done.stdout)


def without_token() -> dict[str, str]:
    return access.environment_without_token(os.environ)


def write_tokens(config: RunConfig) -> None:
    """Write the run's secret and the workers' token into files that only their owner may read.

    Raises:
        ConfigError: The run is on with another secret, which its processes read as they are started again.
    """
    folder = folder_of(config) / TOKENS
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
    logs = folder_of(config) / "logs"
    logs.mkdir(exist_ok=True)
    with Stops() as stops:  # from here on, so that none comes between the job's submission and its number
        number = submit(text)
        _Job(number, logs / f"slurm-{number}.log", config).follow(stops)


def submit(text: str) -> str:
    """Submit a batch script and return the job's number. Raises `ConfigError` if SLURM refuses it."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=text, **_APART, env=without_token())
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
        self._silence = Silence(f"job {number}", "SLURM", SILENT_S)

    def follow(self, stops: Stops) -> None:
        """Return when the job has completed. Raises as `submit_and_follow`."""
        print(f"submitted job {self._number}, log in {self._log}", flush=True)
        while (state := self._look()).startswith(WAITS_OR_RUNS):
            if (signalled := stops.wait(FOLLOW_EVERY_S)) is not None:
                self._stop(signalled, stops)
        if state == FORGOTTEN and not open_for_reading(self._config).run_state().finished:
            raise RunFailed(f"SLURM has forgotten job {self._number}, which ended a while ago; its log: {self._log}")
        if not state.startswith(("COMPLETED", FORGOTTEN)):
            code = self._code()
            raise RunFailed(f"job {self._number} ended as {state.lower()} with code {code}; its log: {self._log}", code)

    def _look(self) -> str:
        """Show what is new, and return the job's state: the last one known while SLURM does not answer."""
        self._show_log()
        try:
            fields = job_fields(self._number)
        except RunFailed as error:
            if self._silence.lasts(error):
                raise RunFailed(
                    f"SLURM has not answered for {SILENT_S:g} s: {error}; job {self._number} continues, its log: "
                    f"{self._log}"
                ) from None
            return self._state
        self._silence.answered()
        state, reason = fields.get("JobState", FORGOTTEN), fields.get("Reason", "None")
        shown = state if reason == "None" else f"{state} ({reason})"
        if shown != self._shown and state in ("PENDING", "RUNNING"):
            print(f"job {self._number}: {shown}", file=sys.stderr, flush=True)
        self._state, self._shown = state, shown
        return state

    def _code(self) -> int:
        try:
            code, _, number = job_fields(self._number).get("ExitCode", "1:0").partition(":")
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

    def _stop(self, number: signal.Signals, stops: Stops) -> None:
        """Stop the job as Ctrl-C would stop the run, and cancel what is left of it."""
        patient = number == signal.SIGINT
        waits = "; the learner writes a checkpoint first, Ctrl-C again cancels the job" if patient else ""
        print(f"stopping job {self._number}{waits}", file=sys.stderr, flush=True)
        # SIGTERM is what SLURM itself sends at the time limit, after which the job is queued again.
        interrupt = ("scancel", "--batch", "--signal=INT", self._number)
        self._end_by(interrupt, ("RUNNING",), math.inf if patient else self._config.deploy.grace_s + MARGIN_S, stops)
        if self._end_by(("scancel", self._number), WAITS_OR_RUNS, MARGIN_S):
            print(f"job {self._number} has not ended: scancel {self._number}", file=sys.stderr, flush=True)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _end_by(
        self, command: Sequence[str], states: tuple[str, ...], seconds: float, stops: Stops | None = None
    ) -> bool:
        """Run `command` while the job is in one of `states`, repeatedly. Returns whether it still is at the end, which
        a signal brings about where `stops` is given."""
        deadline, again = time.monotonic() + seconds, 0.0
        while self._look().startswith(states):
            if time.monotonic() > deadline:
                return True
            if time.monotonic() > again:
                with contextlib.suppress(RunFailed):
                    ask(*command)
                again = time.monotonic() + AGAIN_S
            if stops is None:
                time.sleep(0.5)
            elif stops.wait(0.5) is not None:
                return True
        return False


def job_fields(number: str) -> dict[str, str]:
    """Return what SLURM says of a job, {} once it has forgotten it. A job has ended once all its components have."""
    try:
        text = ask("scontrol", "--oneliner", "show", "job", number)
    except RunFailed as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    first, *others = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines())
    if any(other.get("JobState", "").startswith(WAITS_OR_RUNS) for other in others):
        return first if first["JobState"].startswith(WAITS_OR_RUNS) else {**first, "JobState": "COMPLETING"}
    return first
