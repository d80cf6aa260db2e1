"""Writes the manifests of a run on Kubernetes, for `kubectl apply -k`.

Learner ranks are a JobSet: one that fails restarts them all from the newest checkpoint. With SQLite the queue is a part
of it and stands on the learner's node, since both use one volume; with PostgreSQL it is a Deployment of two, of which
one stands by. Servers and workers are Deployments: they find the queue by its service, come by joining and leave by
draining, so that scalers and evictions may take them. The only file with tokens is `secret.yaml`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream.deploy.clusters.roles import RELEASE, Parts, Resources, check_token, on_nodes, server_arguments
from slipstream.deploy.servers.devices import nccl_environment
from slipstream.protocol import access
from slipstream.protocol.config import ConfigError, RunConfig, to_toml
from slipstream.protocol.config.fingerprint import release

Manifest = dict[str, Any]

# Folders in each container: the image's own, with task and model; the run file's; the volume's.
WORK, CONFIG, RUNS = "/work", "/etc/slipstream", "/runs"
RUN_FILE = f"{CONFIG}/run.toml"

JOBSET, KEDA = "jobset.x-k8s.io/v1alpha2", "keda.sh/v1alpha1"

# Whole restarts of the learner's JobSet, after which it has failed.
MAX_RESTARTS = 10

# Of the names of objects, to which the cluster adds what tells pods apart: 63 in all.
NAME_LENGTH = 30

# The user of deploy/Containerfile.
USER = 1000

QUEUE = Resources(0, 2, 0)

MASTER_PORT = 29500

# Seconds beyond those that a process takes to drain or to write its checkpoint.
MARGIN_S = 30

# Tells a pod's readiness: /readyz asks for a token, which a probe of kind httpGet could only hold in plain text.
_READY = (
    "import os, urllib.request as web; web.urlopen(web.Request('http://127.0.0.1:{port}{path}', "
    "headers={{'Authorization': 'Bearer ' + os.environ['" + access.TOKEN_VARIABLE + "']}}), timeout=3)"
)


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
    for name, documents in files.items():
        path = folder / name
        private = name == "secret.yaml"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if private:
                os.fchmod(descriptor, 0o600)
            file.write(as_text(documents))
        written.append(path)
    return written


def as_text(documents: list[Manifest]) -> str:
    """Return documents as YAML."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120))


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no references between equal parts."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def manifests(config: RunConfig, run_folder: Path) -> dict[str, list[Manifest]]:
    """Return the manifests of a run by the names of their files. Raises `ConfigError` as `write`."""
    _check(config)
    run = _Run(config)
    files = {
        "config.yaml": [run.object("v1", "ConfigMap", "config", data={"run.toml": _run_toml(run, run_folder)})],
        "secret.yaml": [_secret(run)],
        "storage.yaml": [_volume(run)],
        "queues.yaml": [_service(run), *([_standing_queues(run)] if run.on_postgres else [])],
        "jobset.yaml": [_job_set(run)],
        "servers.yaml": [_servers(run)],
        "workers.yaml": [_workers(run)],
        "disruption.yaml": _disruption(run),
        "network.yaml": _network(run),
        "scaling.yaml": _scaling(run),
    }
    files = {name: documents for name, documents in files.items() if documents}
    # What is removed with `kubectl delete -k` must not take the checkpoints with it.
    resources = [name for name in files if name != "storage.yaml"]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": config.cluster.namespace,
        "resources": resources,
    }
    return {"kustomization.yaml": [kustomization], **files}


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


class _Run:
    """What all manifests of a run share: its names, labels and containers."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.name = _object_name(config.run.name)
        self.on_postgres = config.queue.store_kind == "postgresql"
        self.parts = Parts.of(config)
        self.queue_url = f"http://{self.name}-queue:{config.queue.port}"

    def labels(self, role: str | None = None) -> dict[str, str]:
        """Return the labels of the run's objects, or of those of one role."""
        found = {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/instance": self.name}
        return {**found, "app.kubernetes.io/component": role} if role else found

    def object(self, api: str, kind: str, suffix: str = "", **fields: Any) -> Manifest:
        metadata = {
            "name": f"{self.name}-{suffix}" if suffix else self.name,
            "namespace": self.config.cluster.namespace,
            "labels": self.labels(),
        }
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}

    def template(self, role: str, container: Manifest, pod: Manifest, needed: Resources) -> Manifest:
        """Return the template of a role's pods.

        Args:
            container: Fields of its container that are the role's own.
            pod: Fields of the pod that are.
            needed: What the container asks the node for.
        """
        cluster = self.config.cluster
        selector = cluster.worker_node_selector if role == "worker" else []
        nodes = dict(label.split("=", 1) for label in selector or cluster.node_selector)
        container = {
            "name": role,
            "image": cluster.image,
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "resources": _resources(needed),
            **container,
        }
        mounts = [{"name": "config", "mountPath": CONFIG, "readOnly": True}, {"name": "shm", "mountPath": "/dev/shm"}]
        container["volumeMounts"] = [*mounts, *container.get("volumeMounts", [])]
        # Torch and the server pass tensors between processes in shared memory, of which a pod has 64 MB by default.
        volumes = [
            {"name": "config", "configMap": {"name": f"{self.name}-config"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *pod.pop("volumes", []),
        ]
        spec = {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "automountServiceAccountToken": False,
            **({"nodeSelector": nodes} if nodes else {}),
            **pod,
            "containers": [container],
            "volumes": volumes,
        }
        return {"metadata": {"labels": self.labels(role)}, "spec": spec}

    def environment(self, role: str, **more: str) -> list[Manifest]:
        """Return the variables of a role's container. Only a worker does without the run's secret."""
        key = "worker" if role == "worker" else "secret"
        found: list[Manifest] = [
            {"name": access.TOKEN_VARIABLE, "valueFrom": self.from_secret(key)},
            {"name": RELEASE, "value": release()},
            {"name": "POD_IP", "valueFrom": _field("status.podIP")},
            {"name": "POD_NAME", "valueFrom": _field("metadata.name")},
        ]
        return [*found, *({"name": name, "value": value} for name, value in more.items())]

    def from_secret(self, key: str, optional: bool = False) -> Manifest:
        reference: Manifest = {"name": f"{self.name}-tokens", "key": key}
        return {"secretKeyRef": {**reference, "optional": True} if optional else reference}


def _field(path: str) -> Manifest:
    return {"fieldRef": {"fieldPath": path}}


def _resources(needed: Resources) -> Manifest:
    gpus = {"nvidia.com/gpu": str(needed.gpus)} if needed.gpus else {}
    memory = {"memory": f"{needed.memory_gb}Gi"} if needed.memory_gb else {}
    requests = {"cpu": str(needed.cpus), **memory, **gpus}
    limits = {**memory, **gpus}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _run_toml(run: _Run, run_folder: Path) -> str:
    """Return the run file that all pods read: paths beside it become those of the image."""
    config = on_nodes(run.config, f"{run.name}-queue")
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


def _secret(run: _Run) -> Manifest:
    config = run.config
    tokens = {"secret": str(config.token), "worker": config.token_for("worker"), "viewer": config.token_for("viewer")}
    password = config.queue.store_password or os.environ.get("PGPASSWORD")
    if run.on_postgres and password:
        tokens["postgres"] = password
    return run.object("v1", "Secret", "tokens", type="Opaque", stringData=tokens)


def _volume(run: _Run) -> Manifest:
    cluster = run.config.cluster
    spec: Manifest = {
        "accessModes": ["ReadWriteOnce" if cluster.learner_nodes == 1 else "ReadWriteMany"],
        "resources": {"requests": {"storage": f"{cluster.storage_gb}Gi"}},
    }
    if cluster.storage_class:
        spec["storageClassName"] = cluster.storage_class
    return run.object("v1", "PersistentVolumeClaim", "runs", spec=spec)


def _on_volume(run: _Run) -> list[Manifest]:
    return [{"name": "runs", "persistentVolumeClaim": {"claimName": f"{run.name}-runs"}}]


# The queue.


def _service(run: _Run) -> Manifest:
    port = {"name": "http", "port": run.config.queue.port, "targetPort": "http"}
    return run.object("v1", "Service", "queue", spec={"selector": run.labels("queue"), "ports": [port]})


def _queue_template(run: _Run, pod: Manifest, volumes: list[Manifest]) -> Manifest:
    port = run.config.queue.port
    environment = run.environment("queue")
    if run.on_postgres:
        environment.append({"name": "PGPASSWORD", "valueFrom": run.from_secret("postgres", optional=True)})
    ready = ["python", "-c", _READY.format(port=port, path=access.READY)]
    alive = {"httpGet": {"path": access.HEALTH, "port": "http"}}
    container = {
        "command": ["slipstream", "queue", RUN_FILE],
        "env": environment,
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": {**alive, "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {"exec": {"command": ready}, "periodSeconds": 5, "timeoutSeconds": 5},
        "volumeMounts": [{"name": "runs", "mountPath": RUNS}],
    }
    return run.template("queue", container, {**pod, "volumes": volumes}, QUEUE)


def _standing_queues(run: _Run) -> Manifest:
    """Return two queues on one database: the one that is ready is active, the other stands by."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": run.labels("queue")},
    }
    template = _queue_template(run, {"topologySpreadConstraints": [spread]}, [{"name": "runs", "emptyDir": {}}])
    spec = {"replicas": 2, "selector": {"matchLabels": run.labels("queue")}, "template": template}
    # The one that stands by never becomes ready, so a rollout must not wait for it.
    spec["strategy"] = {"type": "Recreate"}
    return run.object("apps/v1", "Deployment", "queue", spec=spec)


# The learner.


def _job_set(run: _Run) -> Manifest:
    nodes = run.config.cluster.learner_nodes
    jobs = [_replicated("learner", _learner_template(run), nodes, 0, _EXITS)]
    if not run.on_postgres:
        near = {
            "labelSelector": {"matchLabels": run.labels("learner")},
            "topologyKey": "kubernetes.io/hostname",
        }
        beside = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}
        template = _queue_template(run, {"affinity": beside, "restartPolicy": "OnFailure"}, _on_volume(run))
        jobs.append(_replicated("queue", template, 1, run.config.deploy.restart, None))
    kueue = run.config.cluster.kueue
    found = run.object(JOBSET, "JobSet")
    if kueue:
        found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = kueue
    found["spec"] = {
        # The run is over once the learner is; the queue would go on.
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["learner"]},
        # A wrong setting fails at once; whatever else ends a pod restarts all of them.
        "failurePolicy": {
            "maxRestarts": MAX_RESTARTS,
            "rules": [{"name": "settings", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": jobs,
    }
    return found


# Exit code 2 is a wrong run file or command line.
_EXITS: Manifest = {
    "rules": [{"action": "FailJob", "onExitCodes": {"containerName": "learner", "operator": "In", "values": [2]}}]
}


def _replicated(name: str, template: Manifest, pods: int, retries: int, failures: Manifest | None) -> Manifest:
    job: Manifest = {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": retries,
        **({"podFailurePolicy": failures} if failures else {}),
        "template": template,
    }
    return {"name": name, "replicas": 1, "template": {"spec": job}}


def _learner_template(run: _Run) -> Manifest:
    config, nodes = run.config, run.config.cluster.learner_nodes
    # What servers reach it at, for the transfer of weights.
    words = [RUN_FILE, "--resume", "--weight_sync.host", "$(POD_IP)"]
    environment = run.environment("learner", **nccl_environment(config))
    if nodes == 1:
        command = ["slipstream", "learner", *words, "--queue", run.queue_url]
    else:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        environment.append({"name": "NODE_RANK", "valueFrom": _field(index)})
        options = {
            "nnodes": nodes,
            "nproc-per-node": config.learner.ranks // nodes,
            "node-rank": "$(NODE_RANK)",
            "master-addr": f"{run.name}-learner-0-0.{run.name}",
            "master-port": MASTER_PORT,
        }
        command = [
            "torchrun",
            *(f"--{name}={value}" for name, value in options.items()),
            *("-m", "slipstream.learner"),
            *words,
        ]
    container = {
        "command": command,
        "env": environment,
        "volumeMounts": [{"name": "runs", "mountPath": RUNS}],
    }
    pod = {
        "restartPolicy": "Never",
        # At SIGTERM it writes a checkpoint.
        "terminationGracePeriodSeconds": max(60, int(config.deploy.grace_s) + MARGIN_S),
        "volumes": _on_volume(run),
    }
    return run.template("learner", container, pod, run.parts.head)


# Servers and workers.


def _servers(run: _Run) -> Manifest:
    config = run.config
    port = config.vllm.port
    words = server_arguments(run.queue_url, port, "$(POD_NAME)")
    probe = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 10}
    # It drains at SIGTERM as well. Told before, its episodes move on while the pod still has its address.
    drain = f'exec slipstream servers remove "$POD_NAME" --queue {run.queue_url}'
    container = {
        "command": ["slipstream", "vllm", RUN_FILE, *words, "--advertise", f"http://$(POD_IP):{port}"],
        "env": run.environment("server", **nccl_environment(config)),
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": {
            **probe,
            "periodSeconds": 10,
            "failureThreshold": max(6, int(config.vllm.start_timeout_s) // 10),
        },
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**probe, "periodSeconds": 5},
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", drain]}}},
    }
    pod = {"terminationGracePeriodSeconds": int(config.vllm.drain_timeout_s) + 2 * MARGIN_S}
    template = run.template("server", container, pod, run.parts.server)
    return _deployment(run, "server", template, run.parts.servers, config.cluster.max_servers)


def _workers(run: _Run) -> Manifest:
    config = run.config
    container = {
        "command": ["slipstream", "worker", RUN_FILE, "--queue", run.queue_url, "--name", "$(POD_NAME)"],
        "env": run.environment("worker"),
    }
    # At SIGTERM it gives its tickets back and signs off.
    pod = {"terminationGracePeriodSeconds": int(config.deploy.grace_s) + MARGIN_S}
    template = run.template("worker", container, pod, run.parts.worker)
    return _deployment(run, "worker", template, run.parts.workers, config.cluster.max_workers)


def _deployment(run: _Run, role: str, template: Manifest, count: int, most: int) -> Manifest:
    spec: Manifest = {"selector": {"matchLabels": run.labels(role)}, "template": template}
    # The scaler sets the number where there is one.
    spec |= {} if most > count else {"replicas": count}
    return run.object("apps/v1", "Deployment", f"{role}s", spec=spec)


# What the cluster may do with them.


def _disruption(run: _Run) -> list[Manifest]:
    """Return how many pods may be evicted at a time: none of the learner's, some of the others."""
    allowed: dict[str, Manifest] = {
        "learner": {"minAvailable": run.config.cluster.learner_nodes},
        # Of two queues the one that stands by takes over.
        **({} if run.on_postgres else {"queue": {"minAvailable": 1}}),
        "server": {"maxUnavailable": 1},
        "worker": {"maxUnavailable": "25%"},
    }
    return [
        run.object(
            "policy/v1", "PodDisruptionBudget", role, spec={**spec, "selector": {"matchLabels": run.labels(role)}}
        )
        for role, spec in allowed.items()
    ]


def _network(run: _Run) -> list[Manifest]:
    """Return who may connect to whom. Connections to elsewhere are left open, as tools and model hubs need them."""
    queue_port, server_port = run.config.queue.port, run.config.vllm.port
    scaler = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}

    def pods(*roles: str) -> list[Manifest]:
        return [{"podSelector": {"matchLabels": run.labels(role)}} for role in roles]

    ingress: dict[str, list[Manifest]] = {
        "queue": [{"from": [*pods("learner", "server", "worker", "queue"), scaler], "ports": [{"port": queue_port}]}],
        # The transfer of weights, and torch, choose their ports.
        "server": [{"from": pods("worker"), "ports": [{"port": server_port}]}, {"from": pods("learner", "server")}],
        "learner": [{"from": pods("learner", "server")}],
        "worker": [],
    }
    return [
        run.object(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            role,
            spec={"podSelector": {"matchLabels": run.labels(role)}, "policyTypes": ["Ingress"], "ingress": rules},
        )
        for role, rules in ingress.items()
    ]


def _scaling(run: _Run) -> list[Manifest]:
    """Return KEDA's scalers, which keep as many servers and workers as the queue's metrics say are wanted."""
    cluster, found = run.config.cluster, []
    counts = {
        "server": (run.parts.servers, cluster.max_servers),
        "worker": (run.parts.workers, cluster.max_workers),
    }
    for role, (least, most) in counts.items():
        if most <= least:
            continue
        trigger = {
            "type": "metrics-api",
            "metadata": {
                "url": f"http://{run.name}-queue.{cluster.namespace}.svc:{run.config.queue.port}{access.METRICS}",
                "format": "prometheus",
                "valueLocation": f"slipstream_{role}s_wanted",
                "targetValue": "1",
                "authMode": "bearer",
            },
            "authenticationRef": {"name": f"{run.name}-viewer"},
        }
        spec: Manifest = {
            "scaleTargetRef": {"name": f"{run.name}-{role}s"},
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "pollingInterval": 30,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _BEHAVIOR}},
            "triggers": [trigger],
        }
        found.append(run.object(KEDA, "ScaledObject", f"{role}s", spec=spec))
    if found:
        token = {"parameter": "token", "name": f"{run.name}-tokens", "key": "viewer"}
        found.append(run.object(KEDA, "TriggerAuthentication", "viewer", spec={"secretTargetRef": [token]}))
    return found


# What was measured holds for the number that there is: one at a time, and time to see what it brought.
_BEHAVIOR: Mapping[str, Manifest] = {
    "scaleUp": {"stabilizationWindowSeconds": 120, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}]},
    "scaleDown": {"stabilizationWindowSeconds": 600, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}]},
}
