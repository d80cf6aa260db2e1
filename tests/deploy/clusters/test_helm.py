"""The Helm chart, rendered by Helm's own Go library where `pip install helm-python-sdk` has put it, and by a reader of
the few forms that the chart uses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.deploy.clusters import helm, kubernetes
from slipstream.protocol.config import load

Render = Callable[[Path, dict[str, Any]], list[dict[str, Any]]]

POSTGRES = ("--queue.store", "postgresql://db/runs")
# A run file may have braces of its own.
IMAGE = ("--cluster.image", "registry.local/rl:1", "--cluster.namespace", "rl", "--run.name", "braces")


def by_helm(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("Helm is not installed: pip install helm-python-sdk")
    found = importlib.import_module("helm_python").Chart.load(folder).render(values, name="run", namespace="rl")
    return [each for text in found.values() for each in yaml.safe_load_all(text) if each]


def by_hand(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    values = merged(yaml.safe_load((folder / "values.yaml").read_text()), values)

    def value(path: str) -> Any:
        found = values
        for word in path.split("."):
            found = found[word]
        return found

    def put(found: re.Match[str]) -> str:
        words = found[1].split(" .Values.")
        if words[0] == "toJson":
            return json.dumps(value(words[1]))
        if words[0].startswith("required"):
            assert value(words[1]), words[0]
            return str(value(words[1]))
        return {".Release.Namespace": "rl", '"{{"': "{{"}[found[1]]

    objects = []
    for file in sorted((folder / "templates").iterdir()):
        text = file.read_text()
        if chosen := re.fullmatch(
            r"\{\{- if \.Values\.postgres\.url \}\}\n(.*)\{\{- else \}\}\n(.*)\{\{- end \}\}\n", text, re.S
        ):
            text = chosen[1] if value("postgres.url") else chosen[2]
        objects += yaml.safe_load_all(re.sub(r"\{\{ (.+?) \}\}", put, text))
    return [each for each in objects if each]


def merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {key: merged(below.get(key), above[key]) if key in above else below[key] for key in {**below, **above}}


@pytest.fixture(params=[by_helm, by_hand])
def render(request: pytest.FixtureRequest) -> Render:
    render: Render = request.param
    return render


@pytest.fixture
def written(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, list[Any]]]:
    """Writes a chart; returns it, and the objects of the manifests for the same settings."""
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")

    def write(*settings: str) -> tuple[Path, list[Any]]:
        config = load(run_file, [*IMAGE, "--model.path", str(run_file.parent / "model {{ x }}"), *settings])
        helm.write(config, tmp_path / "chart", run_file.parent)
        found = kubernetes.manifests(config, run_file.parent)
        return tmp_path / "chart", [
            each for name, documents in found.items() if name not in helm.LEFT_OUT for each in documents
        ]

    return write


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    for each in found.values():
        if each["kind"] == "ConfigMap":  # comments say which settings are not the default
            each["data"] = {"run.toml": tomllib.loads(each["data"]["run.toml"])}
        if each["kind"] == "PersistentVolumeClaim":  # it stays when the release goes
            assert each["metadata"].pop("annotations", None) in (None, {"helm.sh/resource-policy": "keep"})
            each["spec"].setdefault("storageClassName", None)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        (),
        POSTGRES,
        (*POSTGRES, "--learner.ranks", "4", "--cluster.learner_nodes", "2", "--cluster.head_gpus", "2"),
        ("--cluster.max_servers", "4", "--cluster.storage_class", "fast", "--cluster.server_memory_gb", "64"),
    ],
)
def test_with_its_own_values_it_is_the_manifests(
    render: Render, written: Callable[..., tuple[Path, list[Any]]], settings: tuple[str, ...]
) -> None:
    chart, objects = written(*settings)
    assert by_name(render(chart, {})) == by_name(objects)


def test_values_change_images_counts_resources_storage_and_the_store(
    render: Render, written: Callable[..., tuple[Path, list[Any]]]
) -> None:
    chart, _ = written()
    gpus = {"requests": {"nvidia.com/gpu": "4"}, "limits": {"nvidia.com/gpu": "4"}}
    values = {
        "image": "mine:2",
        "servers": {"count": 5},
        "resources": {"server": gpus},
        "storage": {"size": "7Gi", "class": "slow"},
        "postgres": {"url": "postgresql://other/runs"},
    }
    found = by_name(render(chart, values))
    spec = found["Deployment", "braces-servers"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["replicas"], container["image"]) == (5, "mine:2")
    assert container["resources"]["limits"] == gpus["limits"]
    claim = found["PersistentVolumeClaim", "braces-runs"]["spec"]
    assert (claim["resources"]["requests"]["storage"], claim["storageClassName"]) == ("7Gi", "slow")
    run_toml = found["ConfigMap", "braces-config"]["data"]["run.toml"]
    assert run_toml["queue"]["store"] == "postgresql://other/runs"
    assert found["Deployment", "braces-queue"]["spec"]["replicas"] == 2


def test_several_learner_nodes_without_postgresql_are_refused(
    render: Render, written: Callable[..., tuple[Path, list[Any]]]
) -> None:
    chart, _ = written(*POSTGRES, "--learner.ranks", "2", "--cluster.learner_nodes", "2")
    with pytest.raises(Exception, match=r"learner\.ranks on several nodes need PostgreSQL"):
        render(chart, {"postgres": {"url": ""}})


def test_no_token_is_in_the_chart(written: Callable[..., tuple[Path, list[Any]]]) -> None:
    chart, _ = written("--queue.store", "postgresql://me:hunter2@db/runs")
    texts = "".join(file.read_text() for file in chart.rglob("*") if file.is_file())
    assert "0123456789abcdef" not in texts
    assert "hunter2" not in texts
    assert "kind: Secret" not in texts
