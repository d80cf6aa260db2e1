"""Runs a run on Kubernetes: applies what `slipstream render kubernetes` writes, follows the JobSet, and deletes it.

`slipstream up run.toml --on kubernetes` shows the learner's log and each change of state, and ends as the JobSet does.
What it applied is deleted at its end, however it ends, but for the volume, which has the run's files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import secrets
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from slipstream.deploy.clusters import kubernetes
from slipstream.deploy.clusters.following import Silence, Stops
from slipstream.deploy.clusters.kubernetes import Manifest
from slipstream.deploy.run.process_keeper import RunFailed
from slipstream.protocol.config import ConfigError, RunConfig

FOLLOW_EVERY_S = 2.0

# Time-out of one request to the cluster.
REQUEST_S = 30.0

# For the pods to be gone once they were deleted, beyond the time that the learner has.
MARGIN_S = 60.0

# Seconds without an answer after which the command gives up; the cluster goes on with the run.
SILENT_S = 300.0

# Who the cluster says owns the fields.
MANAGER = "slipstream"

# For what is applied and deleted, while the cluster does not answer or has an error of its own.
AGAIN_WITHIN_S = 60.0

NOT_FOUND, CONFLICT, TOO_MANY, OWN_ERRORS = 404, 409, 429, 500

# Names the command that a JobSet is of: two may be typed at once.
OWNER = "slipstream/up"

# Kinds with pods: they end before what they mount and are reached by.
_WITH_PODS = ("JobSet", "Deployment", "ScaledObject")

_PLURALS = {"NetworkPolicy": "networkpolicies"}

_OPERATORS = {
    kubernetes.JOBSET: "install the JobSet operator (https://jobset.sigs.k8s.io)",
    kubernetes.KEDA: "install KEDA (https://keda.sh), or leave cluster.max_servers and cluster.max_workers at 0",
}


def apply_and_follow(config: RunConfig, run_folder: Path) -> None:
    """Apply the manifests of a run, show the learner's log, and wait until the JobSet has ended.

    Raises:
        ConfigError: The cluster is not there or refuses an object; nothing was placed.
        RunFailed: The run failed.
        KeyboardInterrupt: Ctrl-C. SystemExit: SIGTERM.
    """
    if importlib.util.find_spec("kubernetes") is None:
        raise ConfigError("--on kubernetes: its client is not installed: pip install 'slipstream-rl[kubernetes]'")
    files = kubernetes.manifests(config, run_folder)
    volume, _ = files.pop("storage.yaml"), files.pop("kustomization.yaml")
    run = _Applied(config, [each for documents in files.values() for each in documents])
    with Stops() as stops:
        run.check(volume)
        run.claim()
        try:
            run.apply(volume)
            stopped = run.follow(stops)
        finally:
            run.delete()
    if stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if stopped is not None:
        raise SystemExit(128 + stopped)


class _Refused(Exception):
    """The cluster's answer to a request. `status`: of HTTP; None if there was no answer."""

    def __init__(self, status: int | None, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_its_own(self) -> bool:
        """Whether the cluster itself is at fault, and may answer otherwise when it is asked again."""
        return self.status is None or self.status == TOO_MANY or self.status >= OWN_ERRORS


class _Cluster:
    """Requests to the API server that KUBECONFIG, or the pod's own account, names."""

    def __init__(self) -> None:
        import urllib3
        from kubernetes import client
        from kubernetes import config as access

        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints what it tries
                access.load_config()
        except (access.ConfigException, OSError) as error:
            file = os.environ.get("KUBECONFIG")
            found = f"KUBECONFIG = {file}: {error}" if file else f"{error}; set KUBECONFIG"
            raise ConfigError(f"--on kubernetes: no cluster is configured: {found}") from None
        self._api = client.ApiClient()
        self._refused = client.ApiException
        self._silent = (urllib3.exceptions.HTTPError, OSError)

    def ask(self, method: str, path: str, body: Manifest | None = None, **query: Any) -> bytes:
        """Return the answer's body. Raises `_Refused`."""
        kind = "application/json" if method == "POST" else "application/apply-patch+yaml"
        headers = {"Accept": "*/*", **({"Content-Type": kind} if body else {})}
        request = self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            # JSON is YAML as well; what is sent as JSON the client writes itself.
            body=json.dumps(body) if body and method != "POST" else body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._api.call_api(*request, _request_timeout=REQUEST_S)
            data = bytes(answer.read() or b"")
        except self._refused as error:
            raise _Refused(error.status or None, _words(error.body) or str(error.reason)) from None
        except self._silent as error:
            raise _Refused(None, str(error)) from None
        if not 200 <= answer.status < 300:
            raise _Refused(answer.status, _words(data) or f"{answer.status} {answer.reason}")
        return data

    def ask_until(self, deadline: float, method: str, path: str, body: Manifest | None = None, **query: Any) -> bytes:
        """Ask again until `deadline` while there is no answer, or one that says that the cluster itself is at fault."""
        again = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, _Refused) and error.is_its_own),
            stop=stop_after_delay(max(0.0, deadline - time.monotonic())),
            wait=wait_fixed(1.0),
            reraise=True,
        )
        return again(self.ask, method, path, body, **query)

    def get(self, path: str, **query: Any) -> Any:
        data = self.ask("GET", path, **query)
        try:
            return json.loads(data)
        except ValueError:
            raise _Refused(None, f"no JSON but {data[:100]!r}") from None


def _words(body: object) -> str:
    """Return the message of the API's own answer."""
    try:
        return str(json.loads(body)["message"])  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError):
        return ""


def _path(each: Manifest) -> str:
    api, kind, metadata = each["apiVersion"], each["kind"], each["metadata"]
    root = "/api" if "/" not in api else "/apis"
    plural = _PLURALS.get(kind, f"{kind.lower()}s")
    return f"{root}/{api}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"


class _Applied:
    """The objects of one run on the cluster."""

    def __init__(self, config: RunConfig, objects: list[Manifest]) -> None:
        self._cluster = _Cluster()
        self._namespace = config.cluster.namespace
        self._port = config.queue.port
        self._grace_s = config.deploy.grace_s
        self._objects = objects
        (self._job_set,) = (each for each in objects if each["kind"] == "JobSet")
        self._name: str = self._job_set["metadata"]["name"]
        self._owner = secrets.token_hex(8)
        self._job_set["metadata"]["annotations"] = {OWNER: self._owner}
        self._pods_of = f"app.kubernetes.io/instance={self._name}"
        self._state = ""
        self._shown: dict[str, str] = {}

    def check(self, volume: list[Manifest]) -> None:
        """Let the cluster check all objects without keeping them. Raises `ConfigError`."""
        try:
            self._cluster.get(_path(self._job_set))
        except _Refused as refused:
            if refused.status is None:
                raise ConfigError(f"--on kubernetes: the cluster does not answer: {refused}; see KUBECONFIG") from None
        else:
            raise self._taken()
        for each in [*volume, *self._objects]:
            try:
                self._put(each, dryRun="All")
            except _Refused as refused:
                remedy = _OPERATORS.get(each["apiVersion"]) if refused.status == NOT_FOUND else None
                raise ConfigError(
                    f"--on kubernetes: the cluster refuses {each['kind']} {each['metadata']['name']}: {refused}"
                    + (f"; {remedy}" if remedy else "")
                ) from None

    def _taken(self) -> ConfigError:
        return ConfigError(
            f"run.name: a JobSet {self._name} is in namespace {self._namespace} already; choose another name, or "
            f"kubectl delete jobset {self._name} -n {self._namespace}"
        )

    def _put(self, each: Manifest, again_s: float = 0.0, **query: str) -> None:
        deadline = time.monotonic() + again_s
        self._cluster.ask_until(deadline, "PATCH", _path(each), each, fieldManager=MANAGER, force="true", **query)

    def claim(self) -> None:
        """Create the JobSet, before anything that another command of the same run could have applied.

        Raises:
            ConfigError: Another command was faster; nothing was placed.
        """
        path, deadline = _path(self._job_set), time.monotonic() + AGAIN_WITHIN_S
        try:
            self._cluster.ask_until(deadline, "POST", path.rpartition("/")[0], self._job_set, fieldManager=MANAGER)
        except _Refused as refused:
            if refused.status != CONFLICT:
                raise ConfigError(f"--on kubernetes: the cluster refuses JobSet {self._name}: {refused}") from None
            # It may be ours, where an answer was lost.
            found = json.loads(self._cluster.ask_until(deadline, "GET", path))
            if found["metadata"].get("annotations", {}).get(OWNER) != self._owner:
                raise self._taken() from None

    def apply(self, volume: list[Manifest]) -> None:
        for each in [*volume, *self._objects]:
            if each is self._job_set:
                continue
            try:
                self._put(each, AGAIN_WITHIN_S)
            except _Refused as refused:
                raise RunFailed(f"{each['kind']} {each['metadata']['name']} could not be applied: {refused}") from None
        print(
            f"applied JobSet {self._name} in namespace {self._namespace}; status and page: kubectl port-forward -n "
            f"{self._namespace} service/{self._name}-queue {self._port}",
            flush=True,
        )

    def follow(self, stops: Stops) -> int | None:
        """Return when the JobSet has completed, or the signal that stops the run. Raises `RunFailed`."""
        silence = Silence(self._name, "the cluster", SILENT_S)
        while True:
            try:
                end = self._look()
                silence.answered()
            except _Refused as refused:
                end = None
                if refused.status == NOT_FOUND:
                    raise RunFailed(f"JobSet {self._name} was deleted by somebody else") from None
                if silence.lasts(refused):
                    raise RunFailed(f"the cluster has not answered for {SILENT_S:g} s: {refused}") from None
            if end == "Completed":
                return None
            if end is not None:
                code = self._code()
                raise RunFailed(f"JobSet {self._name} failed: {end}; the learner's code is {code}", code)
            if (signalled := stops.wait(FOLLOW_EVERY_S)) is not None:
                return signalled

    def _look(self) -> str | None:
        """Show what is new. Returns "Completed", the words of a failure, or None while it goes on."""
        status = self._cluster.get(_path(self._job_set)).get("status", {})
        pods = self._pods()
        self._show_log(pods)
        counts = Counter((_role(pod), pod.get("status", {}).get("phase", "Unknown")) for pod in pods)
        shown = ", ".join(f"{count} {role} {phase.lower()}" for (role, phase), count in sorted(counts.items()))
        if restarts := status.get("restarts"):
            shown = f"restart {restarts}: {shown}"
        if shown != self._state:
            print(f"{self._name}: {shown or 'no pods yet'}", file=sys.stderr, flush=True)
        self._state = shown
        for condition in status.get("conditions", []):
            if condition.get("status") == "True" and condition["type"] in ("Completed", "Failed"):
                return (
                    "Completed" if condition["type"] == "Completed" else condition.get("message") or "no reason given"
                )
        return None

    def _pods(self) -> list[Manifest]:
        found = self._cluster.get(f"/api/v1/namespaces/{self._namespace}/pods", labelSelector=self._pods_of)
        pods: list[Manifest] = found["items"]
        return pods

    def _show_log(self, pods: list[Manifest]) -> None:
        """Print what learners have written since the last look."""
        for pod in pods:
            name = pod["metadata"]["name"]
            if _role(pod) != "learner":
                continue
            last = self._shown.get(name, "")
            since: dict[str, Any] = {"sinceTime": last} if last else {}
            path = f"/api/v1/namespaces/{self._namespace}/pods/{name}/log"
            try:
                text = self._cluster.ask("GET", path, container="learner", timestamps="true", **since)
            except _Refused:  # its container has not started, or it is gone
                continue
            for line in text.decode(errors="replace").splitlines():
                at, _, words = line.partition(" ")
                if at > last:
                    print(words, flush=True)
                    self._shown[name] = at

    def _code(self) -> int:
        """Return the exit code of a learner that failed."""
        try:
            pods = self._pods()
        except _Refused:
            return 1
        codes = [
            container.get("state", {}).get("terminated", {}).get("exitCode", 0)
            for pod in pods
            if _role(pod) == "learner"
            for container in pod.get("status", {}).get("containerStatuses", [])
        ]
        return next((code for code in codes if code), 1)

    def delete(self) -> None:
        """Delete all but the volume: first what has pods, whose learner writes a checkpoint."""
        print(f"deleting the objects of {self._name}; its volume {self._name}-runs stays", file=sys.stderr, flush=True)
        again_until = time.monotonic() + AGAIN_WITHIN_S
        self._delete([each for each in self._objects if each["kind"] in _WITH_PODS], again_until)
        deadline = time.monotonic() + self._grace_s + MARGIN_S
        while time.monotonic() < deadline:
            try:
                pods = self._pods()
            except _Refused:
                if time.monotonic() > again_until:
                    break
            else:
                if not pods:
                    break
                self._show_log(pods)
            time.sleep(min(1.0, FOLLOW_EVERY_S))
        again_until = max(again_until, time.monotonic() + AGAIN_WITHIN_S / 2)
        self._delete([each for each in self._objects if each["kind"] not in _WITH_PODS], again_until)

    def _delete(self, objects: list[Manifest], again_until: float) -> None:
        for each in objects:
            try:
                self._cluster.ask_until(again_until, "DELETE", _path(each), propagationPolicy="Background")
            except _Refused as refused:
                if refused.status != NOT_FOUND:
                    kind, name = each["kind"].lower(), each["metadata"]["name"]
                    print(
                        f"{kind} {name} could not be deleted: {refused}; kubectl delete {kind} {name} -n "
                        f"{self._namespace}",
                        file=sys.stderr,
                        flush=True,
                    )


def _role(pod: Manifest) -> str:
    return str(pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", "pod"))
