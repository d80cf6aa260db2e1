"""What the processes of a run need on a cluster, and their commands there.

Queue and learner stand on one node, the head; further ranks of the learner may stand on more such nodes. Servers join
the run and workers find the queue by its URL, so that both may stand anywhere, be restarted elsewhere, and leave by
draining. No token is on a command line.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slipstream.deploy.run.processes import SLIPSTREAM, ProcessKind, Program, environment_of_role, typed
from slipstream.deploy.servers.devices import nccl_environment
from slipstream.deploy.servers.gpu_memory import Parallelism
from slipstream.deploy.servers.vllm_server import on_cpu
from slipstream.protocol import access
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.fingerprint import release

Part = Literal["head", "server", "worker"]

# Variable with the release that the rest of the run has; the command line refuses to start as another.
RELEASE = "SLIPSTREAM_RELEASE"


@dataclass(frozen=True)
class Resources:
    """What one part of a run needs on its node. `memory_gb`: 0 for the cluster's default."""

    gpus: int
    cpus: int
    memory_gb: int


@dataclass(frozen=True)
class Parts:
    """The parts of a run: `heads` nodes that share the learner, of which the first has the queue, and servers and
    workers in any number."""

    head: Resources
    server: Resources
    worker: Resources
    servers: int
    workers: int
    heads: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Parts:
        """Read the parts from the run file, with "auto" resolved. Raises `ConfigError` if the ranks cannot be divided
        among the nodes, or for a teacher to be served."""
        cluster, vllm, ranks = config.cluster, config.vllm, config.learner.ranks
        if ranks % cluster.learner_nodes:
            raise ConfigError(
                f"cluster.learner_nodes = {cluster.learner_nodes}: learner.ranks = {ranks} cannot be divided among "
                f"them; choose a number that divides it"
            )
        if config.teacher.path is not None:
            raise ConfigError(
                "teacher.path: `up` serves a teacher on this machine alone; on a cluster start it yourself "
                "(slipstream serve MODEL), and set teacher.url in place of teacher.path"
            )
        on_each = ranks // cluster.learner_nodes
        head = cluster.head_gpus if cluster.head_gpus != "auto" else 0 if on_cpu() else on_each
        gpus = cluster.server_gpus
        server = gpus if gpus != "auto" else 0 if on_cpu() else Parallelism.of(vllm.args).gpus
        return cls(
            Resources(head, cluster.head_cpus, cluster.head_memory_gb),
            Resources(server, cluster.server_cpus, cluster.server_memory_gb),
            Resources(0, cluster.worker_cpus, cluster.worker_memory_gb),
            vllm.launched,
            config.worker.count,
            cluster.learner_nodes,
        )

    def needs(self) -> list[tuple[Part, Resources, int]]:
        """Return each part that the run has, what one of it needs, and how many there are."""
        every: list[tuple[Part, Resources, int]] = [
            ("head", self.head, self.heads),
            ("server", self.server, self.servers),
            ("worker", self.worker, self.workers),
        ]
        return [part for part in every if part[2]]


@dataclass(frozen=True)
class Node:
    """A node of a cluster, as its scheduler knows it. `memory_gb`: 0 if the scheduler does not count it."""

    name: str
    gpus: int
    cpus: int
    memory_gb: float = 0


def check_fits(part: Part, wanted: Resources, nodes: Sequence[Node], where: str) -> None:
    """Raise `ConfigError` if no node has what one of `part` needs. `where`: names the nodes, as "partition main"."""
    for setting, needed, most, unit in (
        (f"cluster.{part}_gpus", wanted.gpus, max((node.gpus for node in nodes), default=0), "GPUs"),
        (f"cluster.{part}_cpus", wanted.cpus, max((node.cpus for node in nodes), default=0), "CPU cores"),
        (
            f"cluster.{part}_memory_gb",
            wanted.memory_gb,
            max((node.memory_gb for node in nodes), default=0) or wanted.memory_gb,
            "GB of memory",
        ),
    ):
        if needed > most:
            raise ConfigError(
                f"{setting} = {needed}: no node of {where} has more than {most:g} {unit}; lower it"
                + (", or name another partition" if where.startswith("partition") else "")
            )


def check_room(needs: Sequence[tuple[Part, Resources, int]], nodes: Sequence[Node], where: str, remedy: str) -> None:
    """Raise `ConfigError` if all parts together need more than `nodes` have. `remedy`: what helps but lowering them."""
    for unit, of in (("GPUs", "gpus"), ("CPU cores", "cpus"), ("GB of memory", "memory_gb")):
        wanted = sum(getattr(needed, of) * count for _, needed, count in needs)
        there = sum(getattr(node, of) for node in nodes)
        if wanted > there:
            asked = ", ".join(f"{count} x cluster.{part}_{of} = {getattr(needed, of)}" for part, needed, count in needs)
            raise ConfigError(
                f"the run needs {wanted} {unit} ({asked}), and {where} has {there:g}: lower these, vllm.count or "
                f"worker.count, {remedy}"
            )


def check_release(environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` if this machine, or image, has another release than the rest of its run."""
    wanted = environment.get(RELEASE)
    if wanted and wanted != release():
        raise ConfigError(
            f"{RELEASE} = {wanted}: the run has that release, and {release()} is installed here; install the run's "
            f"here, or use an image of it (cluster.image)"
        )


def check_token(config: RunConfig) -> None:
    """Raise `ConfigError` if the run has no secret: its listeners are reached from other machines."""
    if not config.token:
        raise ConfigError(
            f"a run on a cluster listens beyond one machine, which needs a token: set {access.TOKEN_VARIABLE}, as from "
            f"openssl rand -hex 16"
        )


def on_nodes(config: RunConfig, head: str) -> RunConfig:
    """Return the run file that all processes read, with the head's address in it. Servers join by themselves."""
    queue = config.queue.model_copy(update={"host": "0.0.0.0", "url": f"http://{head}:{config.queue.port}"})
    update: dict[str, object] = {"queue": queue}
    if config.vllm.launched:
        update["vllm"] = config.vllm.model_copy(update={"count": 0})
    update["weight_sync"] = config.weight_sync.model_copy(update={"host": head})
    return config.model_copy(update=update)


def server_arguments(queue_url: str, port: int | str, name: str) -> list[str]:
    """Return the words of a server's command after the run file: it joins the run at `port` of its node."""
    settings = ["--vllm.count", "1", "--vllm.host", "0.0.0.0", "--vllm.port", str(port)]
    return ["--join", queue_url, "--name", name, *settings]


# Names of torchrun, which the learner reads as those of any launcher.
NODE_OF_RANK = "GROUP_RANK"


def node_of(program: Program) -> int:
    """Return which of the learner's nodes a rank stands on; 0, the head, for all other programs."""
    return int(program.env.get(NODE_OF_RANK, 0))


def _environments_of_ranks(config: RunConfig) -> list[dict[str, str]]:
    """Return what each rank of a learner on several nodes finds the others by. [{}] on one node, where the learner
    itself starts its ranks."""
    nodes, ranks = config.cluster.learner_nodes, config.learner.ranks
    if nodes == 1:
        return [{}]
    on_each = ranks // nodes
    with socket.create_server(("", 0)) as listener:  # the head is this machine, or one on which it is most likely free
        port = listener.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, config.cluster.head_cpus // on_each))
    shared = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads}
    # The head's address, see `on_nodes`.
    shared |= {"MASTER_ADDR": config.weight_sync.host, "LOCAL_WORLD_SIZE": str(on_each)}
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % on_each), NODE_OF_RANK: str(rank // on_each)}
        for rank in range(ranks)
    ]


def programs(config: RunConfig, run_file: Path, resume: bool, servers: int) -> list[Program]:
    """Return the processes of a run whose run file is that of `on_nodes`, in the order in which they are started.

    Args:
        config: The run file.
        run_file: Where all processes read it.
        resume: Whether the learner continues from its newest checkpoint.
        servers: Servers to start; each has its own port, since several may share a node.
    """
    url = config.queue.address

    def program(name: str, role: ProcessKind, *arguments: str) -> Program:
        env = {**environment_of_role(config, role), RELEASE: release()}
        command = "learner" if role == "rank" else role
        return Program(name, role, [*SLIPSTREAM, command, str(run_file), *arguments], env)

    learner = program("learner", "learner", "--queue", url, *(["--resume"] if resume else []))
    first, *others = _environments_of_ranks(config)
    env = {**learner.env, **nccl_environment(config), "SLIPSTREAM_COMMAND": typed()}
    further = [program(f"learner-{rank}", "rank", "--queue", url) for rank in range(1, len(others) + 1)]
    return [
        replace(program("queue", "queue"), health=url + access.HEALTH),
        *(
            replace(
                program(f"vllm-{i}", "vllm", *server_arguments(url, config.vllm.port + i, f"vllm-{i}")), leaves=True
            )
            for i in range(servers)
        ),
        *(
            program(f"worker-{i}", "worker", "--name", f"worker-{i}", "--queue", url)
            for i in range(config.worker.count)
        ),
        *(
            replace(rank, env={**rank.env, **nccl_environment(config), **own})
            for rank, own in zip(further, others, strict=True)
        ),
        replace(learner, env={**env, **first}, terminal="stdout"),
    ]
