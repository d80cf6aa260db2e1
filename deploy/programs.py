"""The processes of a run on one machine: what is started, under which name, on which cores."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from deploy.placement import Placement, place
from deploy.servers.devices import DevicePlan, environment_of, nccl_environment
from deploy.servers.vllm_server import on_cpu
from protocol import access
from protocol.config import RunConfig

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


def programs(config: RunConfig, run_file: Path, resume: bool, devices: DevicePlan | None = None) -> list[Program]:
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
    return place(sorted(os.sched_getaffinity(0)), config.vllm.count)


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
