"""Runs a run from inside of its SLURM job: queue and learner are children on the first node, servers, workers and
further ranks are steps (`srun`) on theirs.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from slipstream.deploy.clusters.roles import Part, Parts, Resources, node_of, on_nodes, programs
from slipstream.deploy.clusters.slurm import (
    AGAIN_S,
    FOLLOW_EVERY_S,
    QUEUE_URL,
    TOKENS,
    ask,
    folder_of,
    job_fields,
    without_token,
)
from slipstream.deploy.run import run_directory
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.deploy.run.processes import Child, Children, Program
from slipstream.protocol import access
from slipstream.protocol.config import RunConfig
from slipstream.rollout_queue.store import open_for_reading

T = TypeVar("T")

# Seconds without an answer of SLURM after which the job gives up: its time may be over soon.
SILENT_IN_JOB_S = 60.0


def in_job() -> bool:
    """Tell whether this process is the batch script of a job that `script` made."""
    return "SLURM_JOB_ID" in os.environ and os.environ.get("SLIPSTREAM_IN_JOB") == os.environ["SLURM_JOB_ID"]


def to_resume(config: RunConfig, resume: bool) -> bool:
    """Tell whether the run continues: because it was asked to, or since SLURM starts its job again."""
    if resume or int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
        return resume
    return run_directory.has_checkpoint(config) or open_for_reading(config).run_state().version > 0


# Scripts.


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

    async def settle(
        self, config: RunConfig, say: Callable[[str], None], episode_tokens: int | None = None
    ) -> RunConfig:
        self._servers, self._parts, self._folder = config.vllm.launched, Parts.of(config).needs(), folder_of(config)
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
            names = _patiently(
                ask, "scontrol", "show", "hostnames", self._of_group("SLURM_JOB_NODELIST", group)
            ).split()
            tasks = counts(self._of_group("SLURM_TASKS_PER_NODE", group))
            self._places[group] = [node for node, count in zip(names, tasks, strict=True) for _ in range(count)]
        return self._places[group]


def counts(text: str) -> list[int]:
    """Read SLURM's tasks per node, as in 2(x3),1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _address(node: str) -> str:
    """Return the address by which SLURM itself reaches a node."""
    text = _patiently(ask, "scontrol", "--oneliner", "show", "node", node)
    found = re.search(r"NodeAddr=(\S+)", text)
    return found[1] if found else node


class SlurmSteps(Children):
    """Starts queue and learner here, servers, workers and ranks on other nodes as steps."""

    # `slurm.submit_and_follow` sends SIGINT until the job ends, since a batch script that has only begun misses it.
    one_press_s = 10 * AGAIN_S

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
            env=without_token(),
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

    def if_it_runs() -> None:
        if job_fields(number).get("JobState") == "RUNNING":
            ask("scontrol", "requeue", number)

    number = os.environ["SLURM_JOB_ID"]
    _patiently(if_it_runs)


def _patiently(asking: Callable[..., T], *arguments: str) -> T:
    """Return what `asking` returns, which is called again while SLURM does not answer."""
    again = Retrying(
        retry=retry_if_exception_type(RunFailed),
        stop=stop_after_delay(SILENT_IN_JOB_S),
        wait=wait_fixed(FOLLOW_EVERY_S),
        reraise=True,
    )
    return again(asking, *arguments)
