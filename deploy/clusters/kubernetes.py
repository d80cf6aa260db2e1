"""Writes the manifests of a run on Kubernetes, for `kubectl apply -k`, from the templates in `manifests/`.

Learner ranks are a JobSet: one that fails restarts them all from the newest checkpoint. With SQLite the queue is a part
of it and stands on the learner's node, since both use one volume; with PostgreSQL it is a Deployment of two, of which
one stands by. Servers and workers are Deployments: they find the queue by its service, come by joining and leave by
draining, so that scalers and evictions may take them. The only file with tokens is `secret.yaml`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import jinja2

from slipstream.deploy.clusters.roles import RELEASE, Parts, Resources, check_token, on_nodes, server_arguments
from slipstream.deploy.servers.devices import nccl_environment
from slipstream.protocol import access
from slipstream.protocol.config import ConfigError, RunConfig, to_toml
from slipstream.protocol.config.fingerprint import release

TEMPLATES = Path(__file__).with_name("manifests")

# Folders in each container: the image's own, with task and model; the run file's; the volume's.
WORK, CONFIG, RUNS = "/work", "/etc/slipstream", "/runs"
RUN_FILE = f"{CONFIG}/run.toml"

# Of the names of objects, to which the cluster adds what tells pods apart: 63 in all.
NAME_LENGTH = 30

# The user of deploy/Containerfile.
USER = 1000

QUEUE = Resources(0, 2, 0)


def write(config: RunConfig, folder: Path, run_folder: Path) -> list[Path]:
    """Write the manifests of a run into `folder` and return their files.

    Args:
        config: The run file.
        folder: Where to write; made if it is not there.
        run_folder: The run file's folder, whose contents the image holds in `WORK`.

    Raises:
        ConfigError: A setting does not fit Kubernetes; nothing was written.
    """
    files = manifests(config, run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        path = folder / name
        private = name == "secret.yaml"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if private:
                os.fchmod(descriptor, 0o600)
            file.write(text)
        written.append(path)
    return written


def manifests(config: RunConfig, run_folder: Path) -> dict[str, str]:
    """Return the manifests of a run by the names of their files. Raises `ConfigError` as `write`."""
    _check(config)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = json.dumps
    values = _values(config, run_folder)
    found = {
        file.name.removesuffix(".jinja"): environment.get_template(file.name).render(values)
        for file in sorted(TEMPLATES.glob("*.yaml.jinja"))
    }
    return {name: f"{text.strip()}\n" for name, text in found.items() if text.strip()}


def _values(config: RunConfig, run_folder: Path) -> dict[str, Any]:
    """Return what the templates insert."""
    parts, cluster = Parts.of(config), config.cluster
    name = _object_name(config.run.name)
    queue_url = f"http://{name}-queue:{config.queue.port}"
    port = config.vllm.port

    def labels(role: str | None = None) -> dict[str, str]:
        found = {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/instance": name}
        return {**found, "app.kubernetes.io/component": role} if role else found

    def node_selector(role: str) -> dict[str, str]:
        selector = cluster.worker_node_selector if role == "worker" else []
        return dict(label.split("=", 1) for label in selector or cluster.node_selector)

    most = {"server": (parts.servers, cluster.max_servers), "worker": (parts.workers, cluster.max_workers)}
    return {
        "access": access,
        "drain_timeout_s": int(config.vllm.drain_timeout_s),
        "folders": {"config": CONFIG, "runs": RUNS},
        "grace_s": int(config.deploy.grace_s),
        "image": cluster.image,
        "kueue": cluster.kueue,
        "labels": labels,
        "learner_nodes": cluster.learner_nodes,
        "name": name,
        "namespace": cluster.namespace,
        "nccl_environment": nccl_environment(config),
        "node_selector": node_selector,
        "on_postgres": config.queue.store_kind == "postgresql",
        "parts": parts,
        "queue_needs": QUEUE,
        "queue_port": config.queue.port,
        "queue_url": queue_url,
        "ranks": config.learner.ranks,
        "release": release(),
        "release_variable": RELEASE,
        "resources": _resources,
        "restart": config.deploy.restart,
        "run_file": RUN_FILE,
        "run_toml": _run_toml(config, name, run_folder),
        # Servers and workers with a scaler: how many there are at least, and at most.
        "scaled": {role: counts for role, counts in most.items() if counts[1] > counts[0]},
        "server_command": [
            *("slipstream", "vllm", RUN_FILE, *server_arguments(queue_url, port, "$(POD_NAME)")),
            *("--advertise", f"http://$(POD_IP):{port}"),
        ],
        "server_port": port,
        "start_timeout_s": int(config.vllm.start_timeout_s),
        "storage_class": cluster.storage_class,
        "storage_gb": cluster.storage_gb,
        "tokens": _tokens(config),
        "user": USER,
    }


def _check(config: RunConfig) -> None:
    check_token(config)
    cluster = config.cluster
    Parts.of(config)
    if cluster.image is None:
        raise ConfigError(
            "cluster.image is not set: build deploy/Containerfile, with your task and model in it, and name the image "
            "as registry/name:tag"
        )
    if config.queue.store_kind == ":memory:":
        raise ConfigError(
            "queue.store = :memory:: a pod that is started again would have lost the run; use sqlite or postgresql://"
        )
    if cluster.learner_nodes > 1 and config.queue.store_kind == "sqlite":
        raise ConfigError(
            f"cluster.learner_nodes = {cluster.learner_nodes}: their volume is shared by nodes, where SQLite is not "
            f"safe; set queue.store = postgresql://host/database"
        )


def _object_name(run_name: str) -> str:
    """Return the name of a run's objects: of at most 30 small letters, digits and dashes, another for each run."""
    name = re.sub("[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if name == run_name and len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH - 7].strip('-') or 'run'}-{hashlib.sha256(run_name.encode()).hexdigest()[:6]}"


def _resources(needed: Resources) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": str(needed.gpus)} if needed.gpus else {}
    memory = {"memory": f"{needed.memory_gb}Gi"} if needed.memory_gb else {}
    requests = {"cpu": str(needed.cpus), **memory, **gpus}
    limits = {**memory, **gpus}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _run_toml(config: RunConfig, name: str, run_folder: Path) -> str:
    """Return the run file that all pods read: paths next to it become those of the image."""
    config = on_nodes(config, f"{name}-queue")
    prefix = f"{run_folder.absolute()}/"

    def in_image(value: object) -> object:
        if isinstance(value, list):
            return [in_image(each) for each in value]
        if isinstance(value, str) and value.startswith(prefix):
            return f"{WORK}/{value.removeprefix(prefix)}"
        return value

    sections = {}
    for section, table in config:
        changed = {key: new for key, value in table if (new := in_image(value)) != value}
        if section == "run":
            changed["dir"] = Path(RUNS)
        sections[section] = table.model_copy(update=changed)
    return to_toml(config.model_copy(update=sections))


def _tokens(config: RunConfig) -> dict[str, str | None]:
    tokens = {"secret": config.token, "worker": config.token_for("worker"), "viewer": config.token_for("viewer")}
    password = config.queue.store_password or os.environ.get("PGPASSWORD")
    if config.queue.store_kind == "postgresql" and password:
        tokens["postgres"] = password
    return tokens
