"""One real vLLM server for the whole test run, and the processes of small runs against it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy import vllm_server
from protocol.config import RunConfig, load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multiply"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Processes:
    """Child processes by name, each in a process group of its own and with a log file."""

    log_dir: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.log_dir / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=env or dict(os.environ),
                cwd=self.log_dir,
            )
        self.running[name] = process
        return process

    def slipstream(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(name, sys.executable, "-m", "deploy.cli", *arguments)

    def kill(self, name: str) -> None:
        """`kill -9`, of the whole group."""
        process = self.running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        return (self.log_dir / f"{name}.log").read_text(errors="replace")

    def wait(self, name: str, timeout_s: float) -> int:
        """The exit code of `name`; fails with its log if another process died first or time ran out."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code = self.running[name].poll()
            if code is not None:
                return code
            for other, process in self.running.items():
                if process.poll() not in (None, 0):
                    pytest.fail(f"{other} ended with {process.poll()}:\n{self.log(other)[-4000:]}")
            time.sleep(0.1)
        pytest.fail(f"{name} did not end in {timeout_s} s:\n{self.log(name)[-4000:]}")

    def stop_all(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The warm-started tiny policy; built here if deploy/test.sh has not."""
    folder = EXAMPLE / "models" / "seed-0"
    subprocess.run([sys.executable, str(EXAMPLE / "build_model.py"), "--out", str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def vllm_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the one real vLLM server."""
    config = load(EXAMPLE / "run.toml", ["--model.path", str(model_folder), "--vllm.port", str(free_port())])
    processes = Processes(tmp_path_factory.mktemp("vllm"))
    env = vllm_server.environment(config) | {"OMP_NUM_THREADS": "1"}
    server = processes.start("vllm", *vllm_server.command(config, 0), env=env)
    url = config.vllm.urls[0]
    try:
        _wait_until_healthy(url, server, processes)
        yield url
    finally:
        processes.stop_all()


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], processes: Processes) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"vLLM did not come up:\n{processes.log('vllm')[-4000:]}")


@dataclass
class SmallRun:
    """A run of the multiply example in a folder of its own, against the shared server."""

    config: RunConfig
    run_file: Path
    processes: Processes

    def start(self, *names: str, resume: bool = False) -> None:
        for name in names:
            flags = ["--resume"] if resume and name == "learner" else []
            if name.startswith("worker"):
                flags += ["--name", name]
            self.processes.slipstream(name, name.split("-")[0], str(self.run_file), *flags)


@pytest.fixture
def small_run(vllm_url: str, model_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallRun]:
    """Ready to start; overrides come from `@pytest.mark.parametrize("small_run", [[...]], indirect=True)`."""
    from deploy.preflight import write_resolved

    overrides = [
        *("--run.name", tmp_path.name),
        *("--run.dir", str(tmp_path)),
        *("--model.path", str(model_folder)),
        *("--queue.port", str(free_port())),
        *("--vllm.servers", f'["{vllm_url}"]'),
        *getattr(request, "param", []),
    ]
    config = load(EXAMPLE / "run.toml", overrides)
    run = SmallRun(config, write_resolved(config), Processes(tmp_path))
    try:
        yield run
    finally:
        run.processes.stop_all()
