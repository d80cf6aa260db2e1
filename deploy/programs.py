"""The processes of a run on one machine: what is started, under which name, on which cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deploy.placement import Placement, place
from deploy.vllm_server import on_cpu
from protocol import routes
from protocol.config import RunConfig

Role = Literal["preflight", "queue", "vllm", "worker", "learner"]

# -P: a folder of the user's that is called `protocol` or `deploy` is not imported from the working directory.
SLIPSTREAM = (sys.executable, "-P", "-m", "deploy.cli")


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
    return Program("preflight", "preflight", command, _token(config), terminal="stderr")


def programs(config: RunConfig, run_file: Path, resume: bool) -> list[Program]:
    """All processes of the run that `run_file` describes, in the order in which they are started."""
    servers = [] if config.vllm.servers else list(config.server_names.items())
    placement = _placement(config)
    token = _token(config)
    server_env = token | ({"OMP_NUM_THREADS": str(placement.server_threads)} if placement else {})
    server_cores = placement.servers if placement else []
    other_env = token | ({"OMP_NUM_THREADS": str(len(placement.others))} if placement else {})
    other_cores = placement.others if placement else []

    def command(*arguments: str) -> list[str]:
        return [*SLIPSTREAM, arguments[0], str(run_file), *arguments[1:]]

    health = config.queue.url + routes.HEALTH
    return [
        Program("queue", "queue", command("queue"), other_env, other_cores, health),
        *(
            Program(name, "vllm", command("vllm", "--index", str(i)), server_env, server_cores, f"{url}/health")
            for i, (name, url) in enumerate(servers)
        ),
        *(
            Program(name, "worker", command("worker", "--name", name), other_env, other_cores)
            for name in (f"worker-{i}" for i in range(config.worker.count))
        ),
        Program(
            *("learner", "learner", command("learner", *_resume(resume)), other_env, other_cores), terminal="stdout"
        ),
    ]


def _placement(config: RunConfig) -> Placement | None:
    """None, nothing is pinned: on a GPU, with servers elsewhere, and on platforms that cannot."""
    if config.vllm.servers or not on_cpu() or not hasattr(os, "sched_setaffinity"):
        return None
    return place(sorted(os.sched_getaffinity(0)), config.vllm.count)


def _token(config: RunConfig) -> dict[str, str]:
    """By the environment only: other users can read a command line."""
    return {"SLIPSTREAM_TOKEN": config.token} if config.token else {}


def _resume(resume: bool) -> list[str]:
    return ["--resume"] if resume else []
