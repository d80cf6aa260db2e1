"""A stand-in of Kubernetes' API server: keeps what is applied, and tells of JobSet, pods and logs what a test says.

It knows the routes that `deploy/clusters/kubernetes_run.py` asks for, by the API's documentation; it is no recording.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: tests
contexts: [{{name: tests, context: {{cluster: tests, user: tests}}}}]
clusters: [{{name: tests, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: tests, user: {{token: a-token}}}}]
"""


class StandInCluster:
    """Start it, set KUBECONFIG to `write_config()`, and close it.

    Attributes:
        objects: What is there, by path, in the order in which it came.
        deleted: Paths, in the order in which they went.
        refusals: Answers by the kind of an object: a status and the API's message.
        failures: Answers to the next requests, whatever they ask for, as a number of them for each method.
        status: The JobSet's status.
        pods: Pods of the run; none once the JobSet was deleted.
        logs: Lines of pods' logs, by name, each with its time.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.refusals: dict[str, tuple[int, str]] = {}
        self.failures: dict[str, int] = {}
        self.status: dict[str, Any] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, list[str]] = {}
        self.tokens: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def write_config(self, folder: Path) -> Path:
        file = folder / "kubeconfig"
        file.write_text(KUBECONFIG.format(port=self._server.server_port), encoding="utf-8")
        return file

    def add_pod(self, name: str, role: str, phase: str = "Running", code: int | None = None) -> None:
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        status = {"phase": phase, "containerStatuses": [{"name": role, "state": state}]}
        labels = {"app.kubernetes.io/component": role}
        self.pods.append({"metadata": {"name": name, "labels": labels}, "status": status})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if self.failures.get(method, 0) > 0:
            self.failures[method] -= 1
            return 503, {"kind": "Status", "message": "the server is currently unable to handle the request"}
        if path.endswith("/pods"):
            return 200, {"items": self.pods}
        if path.endswith("/log"):
            since = query.get("sinceTime", [""])[0]
            return 200, "\n".join(line for line in self.logs.get(path.split("/")[-2], []) if line.split()[0] >= since)
        if method == "POST":
            found = json.loads(body)
            path = f"{path}/{found['metadata']['name']}"
            if path in self.objects:
                return 409, {"kind": "Status", "message": f"{path} already exists"}
            self.objects[path] = found
            return 201, found
        if method == "PATCH":
            found = json.loads(body)
            if found["kind"] in self.refusals:
                status, text = self.refusals[found["kind"]]
                return status, {"kind": "Status", "message": text}
            if "dryRun" not in query:
                self.objects[path] = found
            return 200, found
        if path not in self.objects:
            return 404, {"kind": "Status", "message": "not found"}
        if method == "DELETE":
            self.deleted.append(path)
            if "/jobsets/" in path:
                self.pods = []
            return 200, self.objects.pop(path)
        return 200, {**self.objects[path], **({"status": self.status} if "/jobsets/" in path else {})}


class _Handler(BaseHTTPRequestHandler):
    cluster: StandInCluster

    def _answer(self) -> None:
        self.cluster.tokens.add(self.headers.get("Authorization", ""))
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, found = self.cluster.answer(self.command, address.path, parse_qs(address.query), body)
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        pass
