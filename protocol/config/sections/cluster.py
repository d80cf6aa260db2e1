"""Settings of a run on the machines of a cluster: what each of its processes needs there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.protocol.config.sections.base import Count, CountOrZero, Section, setting

Gpus = Annotated[int, Field(ge=0, le=1024)] | Literal["auto"]
Gigabytes = Annotated[int, Field(ge=0, le=10**6)]

TIME = r"^([0-9]+-)?[0-9]+(:[0-9][0-9]){0,2}$"
PARTITION = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
DNS_NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"

SbatchOption = Annotated[str, Field(pattern=r"^--[a-z-]+(=[^\n]*)?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
NodeLabel = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*=[A-Za-z0-9_.-]*$")]


class ClusterSection(Section):
    head_gpus: Gpus = setting(
        "auto",
        description="GPUs of the head, which runs queue and learner, and of each further node of "
        "cluster.learner_nodes; auto: one per rank there, none with vLLM's CPU build",
        why="a rank trains on one GPU",
    )
    head_cpus: Count = setting(8, description="CPU cores of each learner node", why="the queue and data loading")
    head_memory_gb: Gigabytes = setting(
        0,
        description="gigabytes of memory of each learner node; 0: the site's default",
        why="sites differ",
    )
    server_gpus: Gpus = setting(
        "auto",
        description="GPUs of each of vllm.count servers; auto: from vllm.args, none with vLLM's CPU build",
        why="--tensor-parallel-size decides",
    )
    server_cpus: Count = setting(8, description="CPU cores of each server", why="vLLM's processes")
    server_memory_gb: Gigabytes = setting(
        0,
        description="gigabytes of memory of each server; 0: the site's default",
        why="sites differ",
    )
    worker_cpus: Count = setting(2, description="CPU cores of each of worker.count workers", why="episodes mostly wait")
    worker_memory_gb: Gigabytes = setting(
        0,
        description="gigabytes of memory of each worker; 0: the site's default",
        why="sites differ",
    )
    partition: str | None = setting(
        None, pattern=PARTITION, description="slurm: partition of head and servers", why="the site's"
    )
    worker_partition: str | None = setting(
        None,
        pattern=PARTITION,
        description="slurm: partition of the workers; default: that of the others",
        why="the same",
    )
    time_limit: str | None = setting(
        None,
        pattern=TIME,
        description="slurm: time limit of the job, as 24:00:00 or 2-00:00:00; the learner writes a checkpoint two"
        " minutes before it",
        why="the partition's",
    )
    requeue: bool = setting(
        True,
        description="slurm: queue the job again at its time limit, to resume from the checkpoint",
        why="runs outlast jobs",
    )
    sbatch: list[SbatchOption] = setting(
        [], description="slurm: further options of sbatch, as --account=physics", why="none"
    )

    ray_address: str = setting(
        "auto",
        description="ray: the cluster, as 10.0.0.5:6379 or ray://10.0.0.5:10001; auto: this machine's, or RAY_ADDRESS",
        why="known on its nodes",
    )
    ray_env: list[Variable] = setting(
        [],
        description='ray: variables here that all processes get, as ["HF_HOME", "WANDB_API_KEY"]',
        why="nodes have their own",
    )
    ray_grows: bool = setting(
        False,
        description="ray: the cluster adds nodes on demand, so more may be requested than it has",
        why="otherwise a shortage is an error",
    )

    image: str | None = setting(
        None,
        pattern=IMAGE,
        description="kubernetes: image of all pods, as registry/name:tag, with task and model in /work "
        "(deploy/Containerfile)",
        why="contains your task",
    )
    namespace: str = setting(
        "default", pattern=DNS_NAME, description="kubernetes: namespace of the run", why="Kubernetes'"
    )
    learner_nodes: Count = setting(
        1,
        description="slurm, ray, kubernetes: nodes that share learner.ranks evenly; the first also has the queue",
        why="one suffices",
    )
    node_selector: list[NodeLabel] = setting(
        [],
        description="kubernetes, ray: node labels for all pods or actors, as pool=gpu",
        why="any node with GPUs",
    )
    worker_node_selector: list[NodeLabel] = setting(
        [],
        description="kubernetes, ray: node labels for workers; default: as the others'",
        why="the same",
    )
    storage_gb: Count = setting(
        100, description="kubernetes: gigabytes of the run directory's volume", why="a few checkpoints"
    )
    storage_class: str | None = setting(
        None, pattern=DNS_NAME, description="kubernetes: storage class of that volume", why="the cluster's"
    )
    max_servers: CountOrZero = setting(
        0,
        description="kubernetes: servers up to which a KEDA scaler may go, from vllm.count; 0: no scaler",
        why="needs KEDA",
    )
    max_workers: CountOrZero = setting(
        0,
        description="kubernetes: workers up to which a KEDA scaler may go, from worker.count; 0: no scaler",
        why="needs KEDA",
    )
    kueue: str | None = setting(
        None,
        pattern=DNS_NAME,
        description="kubernetes: Kueue's local queue in which the learner waits for its nodes",
        why="needs Kueue",
    )
