"""Writes a Helm chart of a run from its manifests, beside them: what sites change is a value, all else is as rendered.

The chart holds no token: the Secret is the manifests' own, applied first. With `postgres.url` set, queue and disruption
budgets are those of a run on PostgreSQL, else those of SQLite on the volume.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream.deploy.clusters import kubernetes
from slipstream.deploy.clusters.kubernetes import Manifest
from slipstream.protocol.config import RunConfig
from slipstream.protocol.config.fingerprint import release

# Not in the chart: the Secret comes first, so that no value holds a token.
LEFT_OUT = ("kustomization.yaml", "secret.yaml")

# Stands in the manifests for PostgreSQL's URL, which the run file has.
_POSTGRES = "postgresql://value-of-the-chart/postgres"

# A value as it stands in a manifest, quoted as YAML and TOML quote a text with an @.
_VALUE = re.compile(r"""(['"])@@([\w.]+)@@\1""")

_COUNTS = {"server": "servers.count", "worker": "workers.count"}


def write(config: RunConfig, folder: Path, run_folder: Path) -> list[Path]:
    """Write the chart into `folder` and return its files. Arguments and errors are those of `kubernetes.write`."""
    values, templates = chart(config, run_folder)
    name = str(kubernetes.manifests(config, run_folder)["config.yaml"][0]["metadata"]["name"]).removesuffix("-config")
    about = {"apiVersion": "v2", "name": name, "type": "application", "version": "0.1.0", "appVersion": release()}
    files = {
        "Chart.yaml": yaml.safe_dump({**about, "description": f"Slipstream's run {config.run.name}"}, sort_keys=False),
        "values.yaml": yaml.safe_dump(values, sort_keys=False),
        **{f"templates/{name}": text for name, text in templates.items()},
    }
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    for each, text in files.items():
        (folder / each).write_text(text, encoding="utf-8")
    return [folder / each for each in files]


def chart(config: RunConfig, run_folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the chart's values, and its templates by the names of their files."""
    on_postgres = _templates(_with(config, _POSTGRES), run_folder)
    values: dict[str, Any] = {"image": config.cluster.image, "postgres": {"url": ""}}
    if config.queue.store_kind == "postgresql":
        values["postgres"]["url"] = str(config.queue.store)
    parts = [kubernetes.manifests(_with(config, _POSTGRES), run_folder)]
    if config.cluster.learner_nodes > 1:  # nodes share the volume, on which SQLite is not safe
        needed = '{{ required "postgres.url: learner.ranks on several nodes need PostgreSQL" .Values.postgres.url }}'
        templates = {
            name: text.replace("{{ toJson .Values.postgres.url }}", f'"{needed}"') for name, text in on_postgres.items()
        }
    else:
        on_sqlite = _templates(_with(config, "sqlite"), run_folder)
        templates = {
            name: _either(on_postgres.get(name, ""), on_sqlite.get(name, "")) for name in {**on_postgres, **on_sqlite}
        }
        parts.append(kubernetes.manifests(_with(config, "sqlite"), run_folder))
    for manifests in parts:
        for documents in manifests.values():
            for each in documents:
                _collect(each, values)
    return values, templates


def _with(config: RunConfig, store: str) -> RunConfig:
    return config.model_copy(update={"queue": config.queue.model_copy(update={"store": store})})


def _either(on_postgres: str, on_sqlite: str) -> str:
    if on_postgres == on_sqlite:
        return on_postgres
    return f"{{{{- if .Values.postgres.url }}}}\n{on_postgres}{{{{- else }}}}\n{on_sqlite}{{{{- end }}}}\n"


def _templates(config: RunConfig, run_folder: Path) -> dict[str, str]:
    """Return the manifests with places for values in them, as texts."""
    cluster = config.cluster.model_copy(update={"namespace": "@@namespace@@", "image": "@@image@@"})
    files = kubernetes.manifests(config.model_copy(update={"cluster": cluster}), run_folder)
    return {name: _text([_placed(each) for each in found]) for name, found in files.items() if name not in LEFT_OUT}


def _text(documents: list[Manifest]) -> str:
    text = kubernetes.as_text(documents)
    text = text.replace("{{", '{{ "{{" }}')  # what a run file says to a template of its own
    text = text.replace(f'"{_POSTGRES}"', "{{ toJson .Values.postgres.url }}")
    text = _VALUE.sub(
        lambda found: f"{{{{ toJson .Values.{found[2]} }}}}" if found[2] != "namespace" else found[0], text
    )
    return text.replace("@@namespace@@", "{{ .Release.Namespace }}")


def _containers(manifest: Mapping[str, Any]) -> list[Manifest]:
    if manifest["kind"] == "Deployment":
        templates = [manifest["spec"]["template"]]
    elif manifest["kind"] == "JobSet":
        templates = [job["template"]["spec"]["template"] for job in manifest["spec"]["replicatedJobs"]]
    else:
        templates = []
    return [container for template in templates for container in template["spec"]["containers"]]


def _role(manifest: Mapping[str, Any]) -> str:
    return str(_containers(manifest)[0]["name"])


def _placed(manifest: Manifest) -> Manifest:
    """Put places for values into a manifest."""
    for container in _containers(manifest):
        container["resources"] = f"@@resources.{container['name']}@@"
    if manifest["kind"] == "Deployment" and "replicas" in manifest["spec"] and _role(manifest) in _COUNTS:
        manifest["spec"]["replicas"] = f"@@{_COUNTS[_role(manifest)]}@@"
    if manifest["kind"] == "PersistentVolumeClaim":
        manifest["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
        manifest["spec"]["resources"]["requests"]["storage"] = "@@storage.size@@"
        manifest["spec"]["storageClassName"] = "@@storage.class@@"
    return manifest


def _collect(manifest: Manifest, values: dict[str, Any]) -> None:
    """Add the values of the places that `_placed` makes in this manifest."""
    for container in _containers(manifest):
        values.setdefault("resources", {})[container["name"]] = container["resources"]
    if manifest["kind"] == "Deployment" and "replicas" in manifest["spec"] and _role(manifest) in _COUNTS:
        values[_COUNTS[_role(manifest)].partition(".")[0]] = {"count": manifest["spec"]["replicas"]}
    if manifest["kind"] == "PersistentVolumeClaim":
        spec = manifest["spec"]
        size = spec["resources"]["requests"]["storage"]
        values["storage"] = {"size": size, "class": spec.get("storageClassName")}
