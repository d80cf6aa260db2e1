"""One real vLLM server for each process of the tests, and the processes of small runs against it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.deploy.run.run_directory import write_resolved
from slipstream.deploy.servers import vllm_server
from slipstream.protocol.client import QueueClient, QueueError
from slipstream.protocol.config import RunConfig, load
from slipstream.protocol.status import Status
from tests.kit.copies import ENVIRONMENT, Copy
from tests.kit.original import Request
from tests.kit.ports import free_port
from tests.kit.supervised import Patience, Processes, processes

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "multiply"
# Servers, engines, learners and workers import these while they start, which takes ten seconds.
MODULES = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen3.modeling_qwen3",
    "slipstream.deploy.cli",
    "slipstream.learner.run",
    "slipstream.rollout_queue.service",
    "slipstream.rollout_worker.worker",
)
# Builds the engine in the script's own process.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
SCRIPT_LIMIT_S = 200


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The warm-started tiny policy; built here if deploy/test.sh has not."""
    folder = EXAMPLE / "models" / "seed-0"
    arguments = ("--out", str(folder))
    request = Request(str(EXAMPLE / "build_model.py"), arguments, {**os.environ, **ENVIRONMENT}, os.getcwd())
    assert Copy(MODULES, request, (0, 1, 2)).wait() == 0
    return folder


@pytest.fixture(scope="session")
def vllm_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the real vLLM server that this process of the tests has to itself."""
    config = load(EXAMPLE / "run.toml", ["--model.path", str(model_folder), "--vllm.port", str(free_port())])
    with processes(tmp_path_factory.mktemp("vllm"), MODULES) as started:
        env = vllm_server.environment(config) | {"OMP_NUM_THREADS": "1"}
        started.start("vllm", *vllm_server.command(vllm_server.with_cpu_settings(config), 0), env=env)
        wait_until_healthy(config.vllm.urls[0], started)
        yield config.vllm.urls[0]


def wait_until_healthy(url: str, started: Processes) -> None:
    patience = Patience(started.logged)
    while started.running["vllm"].poll() is None and not patience.is_over:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"vLLM did not come up:\n{started.logs()}")


@dataclass
class SmallRun:
    """A run of the multiply example in its own folder."""

    config: RunConfig
    run_file: Path
    processes: Processes

    def start(self, *names: str, resume: bool = False) -> None:
        for name in names:
            flags = ["--resume"] if resume and name == "learner" else []
            if name.startswith("worker"):
                flags += ["--name", name]
            self.processes.slipstream(name, name.split("-")[0], str(self.run_file), *flags)

    def status(self) -> Status | None:
        """None: the queue does not answer."""

        async def ask() -> Status:
            async with QueueClient(self.config.queue.address, patience_s=0.1, timeout_s=5) as client:
                return await client.status()

        try:
            return asyncio.run(ask())
        except QueueError:
            return None

    def moves(self) -> object:
        """Return what changes while the run gets on, or while any of its processes starts."""
        now = self.status()
        facts = now and (now.step, now.version, now.tokens_sampled, now.ledger, now.groups, now.learner.session)
        return facts, self.processes.logged()

    def wait_for(self, reached: Callable[[Status], bool]) -> Status:
        patience = Patience(self.moves)
        while not patience.is_over:
            now = self.status()
            if now is not None and reached(now):
                return now
            time.sleep(0.1)
        pytest.fail(f"not reached:\n{self.processes.logs()}")

    def kill_with_tickets(self, worker: str) -> None:
        """`kill -9` of the only worker at a moment at which it holds a ticket: between two of them it loses nothing."""
        child = self.processes.running[worker]

        def holds_a_ticket(_: Status) -> bool:
            child.signal(signal.SIGSTOP)
            for _ in range(4):  # what it had sent before arrives
                time.sleep(0.25)
                now = self.status()
                if now is None or not now.groups.tickets:
                    break
            else:
                return True
            child.signal(signal.SIGCONT)
            return False

        self.wait_for(holds_a_ticket)
        self.processes.kill(worker)

    def wait(self, name: str) -> int:
        """The exit code of a process."""
        return self.processes.wait(name, self.moves)


def _small_run(model_folder: Path, folder: Path, started: Processes, overrides: list[str]) -> SmallRun:
    ours = [
        *("--run.name", folder.name),
        *("--run.dir", str(folder)),
        *("--model.path", str(model_folder)),
        *("--queue.port", str(free_port())),
    ]
    config = load(EXAMPLE / "run.toml", [*ours, *overrides])
    return SmallRun(config, write_resolved(config), started)


@pytest.fixture
def small_run(vllm_url: str, model_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallRun]:
    """Ready to start, against the shared server; overrides come from
    `@pytest.mark.parametrize("small_run", [[...]], indirect=True)`."""
    overrides = ["--vllm.servers", f'["{vllm_url}"]', *getattr(request, "param", [])]
    with processes(tmp_path, MODULES) as started:
        yield _small_run(model_folder, tmp_path, started, overrides)


@pytest.fixture
def run_of_its_own(model_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallRun]:
    """As `small_run`, but with its own vLLM server, and started as a user starts it: for `slipstream up`."""
    overrides = ["--vllm.port", str(free_port()), *getattr(request, "param", [])]
    with processes(tmp_path) as started:
        yield _small_run(model_folder, tmp_path, started, overrides)


def run_script(folder: Path, script: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run a script that may build an engine in its process, and return what it prints.

    Args:
        folder: Folder for the script and its output; one for each script.
        script: Python code.
        *arguments: The script's `sys.argv[1:]`.
        env: Variables to add to this process's environment.
    """
    (folder / "script.py").write_text(script, encoding="utf-8")
    stdout, stderr = folder / "stdout", folder / "stderr"
    whole = {**os.environ, **ENVIRONMENT, **IN_PROCESS, **(env or {})}
    request = Request(str(folder / "script.py"), arguments, whole, os.getcwd(), limit_s=SCRIPT_LIMIT_S)
    with open(os.devnull, "rb") as nothing, stdout.open("wb") as out, stderr.open("wb") as err:
        code = Copy(MODULES, request, (nothing.fileno(), out.fileno(), err.fileno())).wait()
    assert code == 0, f"ended with {code}:\n{stderr.read_text()[-3000:]}"
    return stdout.read_text()
