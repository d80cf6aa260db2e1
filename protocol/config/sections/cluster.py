"""Settings of a run on the machines of a cluster: what each of its processes needs there."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from slipstream.protocol.config.sections.base import Count, CountOrZero, Section, setting

Gpus = int | Literal["auto"]
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


class ClusterSection(Section):
    head_gpus: Gpus = setting(
        "auto",
        description="GPUs of the head, which runs queue and learner, and of each further node of "
        "cluster.learner_nodes; auto: one per rank there, none with vLLM's CPU build",
        why="a rank trains on one GPU",
    )
    head_cpus: Count = setting(8, description="CPU cores of each learner node", why="the queue and data loading")
    head_memory_gb: int = setting(
        0,
        ge=0,
        le=10**6,
        description="gigabytes of memory of each learner node; 0: the site's default",
        why="sites differ",
    )
    server_gpus: Gpus = setting(
        "auto",
        description="GPUs of each of vllm.count servers; auto: from vllm.args, none with vLLM's CPU build",
        why="--tensor-parallel-size decides",
    )
    server_cpus: Count = setting(8, description="CPU cores of each server", why="vLLM's processes")
    server_memory_gb: int = setting(
        0,
        ge=0,
        le=10**6,
        description="gigabytes of memory of each server; 0: the site's default",
        why="sites differ",
    )
    worker_cpus: Count = setting(2, description="CPU cores of each of worker.count workers", why="episodes mostly wait")
    worker_memory_gb: int = setting(
        0,
        ge=0,
        le=10**6,
        description="gigabytes of memory of each worker; 0: the site's default",
        why="sites differ",
    )
    partition: str | None = setting(None, description="slurm: partition of head and servers", why="the site's")
    worker_partition: str | None = setting(
        None, description="slurm: partition of the workers; default: that of the others", why="the same"
    )
    time_limit: str | None = setting(
        None,
        description="slurm: time limit of the job, as 24:00:00 or 2-00:00:00; the learner writes a checkpoint two"
        " minutes before it",
        why="the partition's",
    )
    requeue: bool = setting(
        True,
        description="slurm: queue the job again at its time limit, to resume from the checkpoint",
        why="runs outlast jobs",
    )
    sbatch: list[str] = setting([], description="slurm: further options of sbatch, as --account=physics", why="none")

    ray_address: str = setting(
        "auto",
        description="ray: the cluster, as 10.0.0.5:6379 or ray://10.0.0.5:10001; auto: this machine's, or RAY_ADDRESS",
        why="known on its nodes",
    )
    ray_env: list[str] = setting(
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
        description="kubernetes: image of all pods, as registry/name:tag, with task and model in /work "
        "(deploy/Containerfile)",
        why="contains your task",
    )
    namespace: str = setting("default", description="kubernetes: namespace of the run", why="Kubernetes'")
    learner_nodes: Count = setting(
        1,
        description="slurm, ray, kubernetes: nodes that share learner.ranks evenly; the first also has the queue",
        why="one suffices",
    )
    node_selector: list[str] = setting(
        [],
        description="kubernetes, ray: node labels for all pods or actors, as pool=gpu",
        why="any node with GPUs",
    )
    worker_node_selector: list[str] = setting(
        [],
        description="kubernetes, ray: node labels for workers; default: as the others'",
        why="the same",
    )
    storage_gb: Count = setting(
        100, description="kubernetes: gigabytes of the run directory's volume", why="a few checkpoints"
    )
    storage_class: str | None = setting(
        None, description="kubernetes: storage class of that volume", why="the cluster's"
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
        None, description="kubernetes: Kueue's local queue in which the learner waits for its nodes", why="needs Kueue"
    )

    @field_validator("head_gpus", "server_gpus")
    @classmethod
    def _gpus(cls, value: Gpus) -> Gpus:
        if value != "auto" and not 0 <= value <= 1024:
            raise ValueError("must be 'auto' or a whole number from 0 to 1024")
        return value

    @field_validator("time_limit")
    @classmethod
    def _time(cls, value: str | None) -> str | None:
        if value is not None and not _TIME.fullmatch(value):
            raise ValueError("must be a time such as 24:00:00 or 2-00:00:00")
        return value

    @field_validator("sbatch")
    @classmethod
    def _options(cls, value: list[str]) -> list[str]:
        for option in value:
            if not re.fullmatch(r"--[a-z-]+(=[^\n]*)?", option):
                raise ValueError(f"{option!r} is no option of sbatch: write it as --account=physics")
        return value

    @field_validator("node_selector", "worker_node_selector")
    @classmethod
    def _labels(cls, value: list[str]) -> list[str]:
        for label in value:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./-]*=[A-Za-z0-9_.-]*", label):
                raise ValueError(f"{label!r} is no label of a node: write it as pool=gpu")
        return value

    @field_validator("ray_env")
    @classmethod
    def _variables(cls, value: list[str]) -> list[str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of a variable: write it as HF_HOME")
        return value

    @field_validator("namespace", "storage_class", "kueue")
    @classmethod
    def _dns_names(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", value):
            raise ValueError("must be a name of at most 63 small letters, digits and dashes")
        return value

    @field_validator("image")
    @classmethod
    def _image(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", value):
            raise ValueError("must be the name of an image, as registry/name:tag")
        return value

    @field_validator("partition", "worker_partition")
    @classmethod
    def _names(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", value):
            raise ValueError("must be a name of letters, digits, dots and dashes")
        return value
