"""What `slipstream render kubernetes` writes: valid by the API's schemas, and every name in it leads somewhere.

No cluster runs here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from slipstream.deploy.cli import app
from slipstream.deploy.clusters import kubernetes
from slipstream.protocol import access
from slipstream.protocol.config import ConfigError, load
from tests.deploy.typed import output
from tests.kit.config import config
from tests.kit.queue import serving

SECRET = "0123456789abcdef0123456789abcdef"
VERSION = "1.31"
IMAGE = ("--cluster.image", "registry.local/rl:1")

# Fields of the operators' own resources that the manifests may hold (JobSet 0.12, KEDA 2.18).
FIELDS = {
    "JobSet": {
        "replicatedJobs",
        "successPolicy",
        "failurePolicy",
        "network",
        "startupPolicy",
        "suspend",
        "coordinator",
    },
    "successPolicy": {"operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "failureRule": {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs"},
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "replicatedJob": {"name", "replicas", "template", "dependsOn", "groupName"},
    "ScaledObject": {
        *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod", "advanced"),
        *("triggers", "fallback", "idleReplicaCount", "initialCooldownPeriod"),
    },
    "trigger": {"type", "metadata", "authenticationRef", "metricType", "name", "useCachedMetrics"},
    "metrics-api": {"url", "format", "valueLocation", "targetValue", "activationTargetValue", "authMode", "unsafeSsl"},
}

POSTGRES = ("--queue.store", "postgresql://db/runs")
VARIANTS: dict[str, tuple[str, ...]] = {
    "sqlite": (),
    "postgres": POSTGRES,
    "ranks": (*POSTGRES, "--learner.ranks", "4", "--cluster.learner_nodes", "2", "--cluster.head_gpus", "2"),
    "scaled": ("--cluster.max_servers", "4", "--cluster.max_workers", "9", "--cluster.kueue", "team"),
    "full": (
        *("--cluster.server_gpus", "2", "--cluster.server_memory_gb", "64", "--cluster.namespace", "rl"),
        *("--cluster.node_selector", '["pool=gpu"]', "--cluster.worker_node_selector", '["pool=cpu"]'),
        *("--cluster.storage_class", "fast", "--vllm.count", "3", "--run.name", "A_long.Name-of-a-run"),
    ),
}

Render = Callable[..., dict[str, list[dict[str, Any]]]]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", SECRET)


@pytest.fixture
def render(run_file: Path, tmp_path: Path) -> Render:
    """Writes the manifests and reads them back, by file."""

    def written(*settings: str) -> dict[str, list[dict[str, Any]]]:
        found = load(run_file, [*IMAGE, *settings])
        files = kubernetes.write(found, tmp_path / "out", run_file.parent)
        return {file.name: [*yaml.safe_load_all(file.read_text(encoding="utf-8"))] for file in files}

    return written


def objects(files: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [each for name, documents in files.items() if name != "kustomization.yaml" for each in documents]


def templates(files: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each role with the template of its pods."""
    for each in objects(files):
        if each["kind"] == "Deployment":
            found = [each["spec"]["template"]]
        elif each["kind"] == "JobSet":
            found = [job["template"]["spec"]["template"] for job in each["spec"]["replicatedJobs"]]
        else:
            continue
        for template in found:
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def container(files: dict[str, list[dict[str, Any]]], role: str) -> dict[str, Any]:
    (found,) = [template["spec"]["containers"][0] for name, template in templates(files) if name == role]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_valid(render: Render, variant: str) -> None:
    for each in objects(render(*VARIANTS[variant])):
        if each["kind"] == "JobSet":
            check_job_set(each)
        elif each["kind"] == "ScaledObject":
            check_scaled_object(each)
        elif each["kind"] == "TriggerAuthentication":
            assert {*each["spec"]["secretTargetRef"][0]} == {"parameter", "name", "key"}
        else:
            kubernetes_validate.validate(each, VERSION, strict=True)


def check_job_set(each: dict[str, Any]) -> None:
    spec = each["spec"]
    assert each["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert {*spec} <= FIELDS["JobSet"]
    for name in ("successPolicy", "failurePolicy", "network"):
        assert {*spec[name]} <= FIELDS[name]
    names = {job["name"] for job in spec["replicatedJobs"]}
    assert {*spec["successPolicy"]["targetReplicatedJobs"]} <= names
    for rule in spec["failurePolicy"]["rules"]:
        assert {*rule} <= FIELDS["failureRule"]
        assert rule["action"] in ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    for job in spec["replicatedJobs"]:
        assert {*job} <= FIELDS["replicatedJob"]
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, VERSION, strict=True)


def check_scaled_object(each: dict[str, Any]) -> None:
    assert each["apiVersion"] == "keda.sh/v1alpha1"
    assert {*each["spec"]} <= FIELDS["ScaledObject"]
    for trigger in each["spec"]["triggers"]:
        assert {*trigger} <= FIELDS["trigger"]
        assert {*trigger["metadata"]} <= FIELDS["metrics-api"]
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
    behavior = each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    scaler = {"maxReplicas": 2, "scaleTargetRef": {"kind": "Deployment", "name": "x"}, "behavior": behavior}
    whole = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "x"}}
    kubernetes_validate.validate({**whole, "spec": scaler}, VERSION, strict=True)


def test_a_fault_in_a_manifest_would_be_found(render: Render) -> None:
    (servers,) = render()["servers.yaml"]
    servers["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(servers, VERSION, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_name_leads_to_an_object(render: Render, variant: str) -> None:
    files = render(*VARIANTS[variant])
    named = {(each["kind"], each["metadata"]["name"]) for each in objects(files)}
    assert len(named) == len(objects(files)), "two objects of one name"
    roles = {role: template["metadata"]["labels"] for role, template in templates(files)}
    (secret,) = files["secret.yaml"]
    for _, template in templates(files):
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in named
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in named
        mounted = {mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
        for variable in template["spec"]["containers"][0]["env"]:
            if "secretKeyRef" in (source := variable.get("valueFrom", {})):
                assert source["secretKeyRef"]["name"] == secret["metadata"]["name"]
                assert source["secretKeyRef"]["key"] in secret["stringData"] or source["secretKeyRef"]["optional"]
    selectors = [each["spec"]["selector"] for each in objects(files) if each["kind"] == "Service"]
    of_pods = [each["spec"].get("selector") for each in objects(files) if each["kind"] == "PodDisruptionBudget"]
    of_pods += [each["spec"]["podSelector"] for each in objects(files) if each["kind"] == "NetworkPolicy"]
    for selector in [*selectors, *(each["matchLabels"] for each in of_pods)]:
        assert selector in roles.values()
    for each in objects(files):
        if each["kind"] == "ScaledObject":
            assert ("Deployment", each["spec"]["scaleTargetRef"]["name"]) in named
            for trigger in each["spec"]["triggers"]:
                assert ("TriggerAuthentication", trigger["authenticationRef"]["name"]) in named
    assert {*files["kustomization.yaml"][0]["resources"]} == {*files} - {"kustomization.yaml", "storage.yaml"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_command_is_one_of_ours_and_reads_the_run_file(render: Render, variant: str, tmp_path: Path) -> None:
    files = render(*VARIANTS[variant])
    (service,) = [each for each in files["queues.yaml"] if each["kind"] == "Service"]
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(files["config.yaml"][0]["data"]["run.toml"], encoding="utf-8")
    commands: Any = typer.main.get_command(app)
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for role in ("queue", "learner", "server", "worker"):
        words = container(files, role)["command"]
        words = [
            word.replace("/etc/slipstream/run.toml", str(run_toml)).replace("$(POD_IP)", "10.0.0.9") for word in words
        ]
        assert len([word for word in words if word == str(run_toml)]) == 1
        if words[0] == "torchrun":
            settings = words[words.index(str(run_toml)) + 1 :]
            settings.remove("--resume")
        else:
            assert words[0] == "slipstream"
            command = commands.commands[words[1]]
            settings = (command.commands["run"] if role == "queue" else command).make_context(words[1], words[2:]).args
        found = load(run_toml, settings)
        assert found.queue.address == url
        assert found.queue.host == "0.0.0.0"
        assert found.run_dir.parent == Path("/runs")
        if role == "learner":
            assert found.weight_sync.host == "10.0.0.9"
    assert found.task.path == "/work/task.py:task"
    assert found.model.path == "/work/model"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_kustomization(render: Render, tmp_path: Path) -> None:
    files = render(*VARIANTS["full"])
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path / "out")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = [*yaml.safe_load_all(done.stdout)]
    assert len(built) == len(objects(files)) - 1, "all but the volume"
    assert {each["metadata"]["namespace"] for each in built} == {"rl"}


def test_tokens_are_in_one_file_that_only_its_owner_may_read(render: Render, tmp_path: Path) -> None:
    files = render()
    (secret,) = files["secret.yaml"]
    assert secret["stringData"] == {
        "secret": SECRET,
        "worker": access.derive_token(SECRET, "worker"),
        "viewer": access.derive_token(SECRET, "viewer"),
    }
    with_token = [
        file.name
        for file in (tmp_path / "out").iterdir()
        if any(token in file.read_text(encoding="utf-8") for token in secret["stringData"].values())
    ]
    assert with_token == ["secret.yaml"]
    assert (tmp_path / "out" / "secret.yaml").stat().st_mode & 0o777 == 0o600
    (token,) = [each for each in container(files, "worker")["env"] if each["name"] == "SLIPSTREAM_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["key"] == "worker"


def test_a_secret_that_others_could_read_is_closed_to_them(render: Render, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret.yaml").touch(mode=0o644)
    render()
    assert (tmp_path / "out" / "secret.yaml").stat().st_mode & 0o777 == 0o600


def test_with_sqlite_the_queue_restarts_with_the_learner_on_its_node(render: Render) -> None:
    files = render()
    (job_set,) = files["jobset.yaml"]
    assert [job["name"] for job in job_set["spec"]["replicatedJobs"]] == ["learner", "queue"]
    (queue,) = [template for role, template in templates(files) if role == "queue"]
    (near,) = queue["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "learner"
    assert files["storage.yaml"][0]["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_with_postgres_two_queues_stand_apart_from_the_learner(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "a password")
    files = render(*VARIANTS["ranks"])
    (job_set,) = files["jobset.yaml"]
    (learner,) = job_set["spec"]["replicatedJobs"]
    assert learner["template"]["spec"]["completions"] == 2
    words = container(files, "learner")["command"]
    assert {"--nnodes=2", "--nproc-per-node=2", "--master-addr=small-learner-0-0.small"} < {*words}
    assert container(files, "learner")["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    (queue,) = [each for each in files["queues.yaml"] if each["kind"] == "Deployment"]
    assert queue["spec"]["replicas"] == 2
    assert files["secret.yaml"][0]["stringData"]["postgres"] == "a password"
    assert "a password" not in str([each for name, each in files.items() if name != "secret.yaml"])
    assert files["storage.yaml"][0]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_scaler_follows_the_queues_own_gauges(render: Render) -> None:
    files = render(*VARIANTS["scaled"], "--worker.count", "2")
    servers, workers, _ = files["scaling.yaml"]
    assert (servers["spec"]["minReplicaCount"], servers["spec"]["maxReplicaCount"]) == (1, 4)
    assert (workers["spec"]["minReplicaCount"], workers["spec"]["maxReplicaCount"]) == (2, 9)
    metrics = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for each in (servers, workers):
        (trigger,) = each["spec"]["triggers"]
        assert f"`{trigger['metadata']['valueLocation']}`" in metrics
    # kubectl apply would set the number back.
    assert "replicas" not in files["servers.yaml"][0]["spec"]
    assert "scaling.yaml" not in render()
    assert files["jobset.yaml"][0]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


async def test_the_readiness_probe_asks_our_route_with_the_token(render: Render) -> None:
    probe = container(render(), "queue")["readinessProbe"]["exec"]["command"]
    async with serving(config({"queue": {"token": SECRET}})) as queue:
        port = queue.url.rpartition(":")[2]
        words = [sys.executable, "-c", probe[2].replace(f":{load_port(probe[2])}/", f":{port}/")]
        for token, code in ((SECRET, 0), ("x" * 32, 1)):
            environment = {**os.environ, "SLIPSTREAM_TOKEN": token}
            asked = await asyncio.create_subprocess_exec(*words, env=environment, stderr=subprocess.DEVNULL)
            assert await asked.wait() == code


def load_port(script: str) -> str:
    return script.partition("127.0.0.1:")[2].partition("/")[0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "cluster.image is not set: build deploy/Containerfile"),
        (["--cluster.image", "x", "--queue.store", ":memory:"], "queue.store = :memory:: a pod that is started again"),
        (
            ["--cluster.image", "x", "--teacher.path", "org/large"],
            "teacher.path: `up` serves a teacher on this machine",
        ),
        (
            ["--cluster.image", "x", "--cluster.learner_nodes", "2"],
            "cluster.learner_nodes = 2: learner.ranks = 1 cannot be divided among them; choose a number",
        ),
        (
            ["--cluster.image", "x", "--cluster.learner_nodes", "2", "--learner.ranks", "2"],
            "cluster.learner_nodes = 2: their volume is shared by nodes, where SQLite is not safe; set queue.store =",
        ),
        (
            ["--cluster.node_selector", '["gpu"]'],
            'cluster.node_selector[0] = "gpu": does not have the right form (kubernetes, ray: node labels for all pods',
        ),
        (
            ["--cluster.image", "a b"],
            'cluster.image = "a b": does not have the right form (kubernetes: image of all pods, as registry/name:tag',
        ),
        (["--cluster.image", "a\nb: c"], "does not have the right form (kubernetes: image of all pods"),
        (
            ["--cluster.namespace", "A B"],
            'cluster.namespace = "A B": does not have the right form (kubernetes: namespace of the run)',
        ),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(
    run_file: Path, tmp_path: Path, settings: list[str], told: str
) -> None:
    code, said = output("render", "kubernetes", str(run_file), "--out", str(tmp_path / "out"), *settings)
    assert code == 2
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_a_token_nothing_is_written(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="needs a token: set SLIPSTREAM_TOKEN"):
        kubernetes.write(load(run_file, ["--cluster.image", "x"]), tmp_path / "out", run_file.parent)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_to_apply(run_file: Path, tmp_path: Path) -> None:
    code, said = output("render", "kubernetes", str(run_file), "--out", str(tmp_path / "its out"), *IMAGE)
    assert code == 0, said
    assert f"kubectl apply -k '{tmp_path / 'its out'}'" in said
    assert (tmp_path / "its out" / "kustomization.yaml").is_file()


def test_a_folder_that_cannot_be_written_is_one_line(run_file: Path) -> None:
    code, said = output("render", "kubernetes", str(run_file), "--out", str(run_file), *IMAGE)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"slipstream: --out {run_file}: {run_file} cannot be written: File exists")


@pytest.mark.parametrize(("one", "other"), [("Run_1", "run-1"), ("x" * 63, "x" * 62), ("__", "_-_"), ("a.b", "a-b")])
def test_each_run_has_objects_of_its_own(render: Render, one: str, other: str) -> None:
    names = [{each["metadata"]["name"] for each in objects(render("--run.name", run))} for run in (one, other)]
    assert not names[0] & names[1]
    assert max(len(name) for each in names for name in each) < 45
