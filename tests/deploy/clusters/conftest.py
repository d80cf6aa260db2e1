"""A real SLURM and a real Ray for the tests of this folder, and a run whose vLLM and learner are stand-ins."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import slurm
from tests.kit.ports import free_port
from tests.kit.ray import RayNodes
from tests.kit.slurm import SlurmCluster
from tests.nights import fleet

ROOT = Path(__file__).parents[3]
SECRET = "0123456789abcdef0123456789abcdef"

FAKE_VLLM = """
import runpy, sys
sys.argv = ["fake_vllm", "--port", sys.argv[sys.argv.index("--port") + 1]]
runpy.run_module("tests.kit.fake_vllm", run_name="__main__")
"""

# It is done once a server and all workers have come and nothing holds it back; at SIGTERM it writes a checkpoint.
LEARNER = """
import asyncio, os, signal, sys, time
from slipstream.protocol.client import QueueClient

def run(config, queue_url, resume, take_over, demonstrations=()):
    def stop(number, frame):
        folder = config.run_dir / "checkpoints" / "step-000003"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text('{"step": 3, "version": 3}')
        print("step 3: checkpoint written at the signal", flush=True)
        sys.exit(128 + number)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    async def everyone():
        async with QueueClient(queue_url, config.token_for("learner")) as queue:
            while True:
                status = await queue.status()
                if len(status.workers) >= config.worker.count and status.servers:
                    return [*status.servers, *status.workers]
                await asyncio.sleep(0.1)
    everyone = asyncio.run(everyone())
    names = sorted(getattr(each, "name", None) or each.worker_id for each in everyone)
    print(f"all have come: {', '.join(names)}; resume {resume}", flush=True)
    while os.path.exists(os.environ["HOLD"]):
        time.sleep(0.1)
"""

# Python imports it at each start.
IN_PLACE_OF_THE_LEARNER = """
import importlib.util, os, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "slipstream.learner.run":
            file = os.path.join(os.path.dirname(__file__), "learner_run.py")
            return importlib.util.spec_from_file_location(name, file)

sys.meta_path.insert(0, Finder)
"""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a run of multiply in `tmp_path`: servers are fakes with real weights, everything else is real."""
    stub = tmp_path / "stubs" / "vllm" / "entrypoints" / "openai"
    stub.mkdir(parents=True)
    for folder in (stub, stub.parent, stub.parent.parent):
        (folder / "__init__.py").touch()
    (stub / "api_server.py").write_text(fleet.FAKE_VLLM, encoding="utf-8")
    fleet.save_model(tmp_path / "model")
    for name in ("run.toml", "task.py"):
        shutil.copy(fleet.EXAMPLE / name, tmp_path / name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stubs"), str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SLIPSTREAM_TOKEN", SECRET)
    return [
        *("--run.name", "example", "--run.dir", str(tmp_path / "runs"), "--model.path", str(tmp_path / "model")),
        *("--queue.port", str(free_port()), "--vllm.port", str(free_port()), "--weight_sync.transport", "http"),
        *("--rollout.group_size", "4", "--learner.groups_per_step", "4", "--learner.checkpoint_every", "2"),
        *("--worker.episodes", "32", "--worker.count", "1"),
        *("--cluster.server_cpus", "1", "--cluster.worker_cpus", "1", "--cluster.head_cpus", "6"),
    ]


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if not slurm.is_installed():
        pytest.skip("SLURM is not installed: apt-get install slurm-wlm munge")
    cluster = SlurmCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def slurm_here(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """SLURM's commands of this process ask the cluster; jobs that a test leaves are cancelled."""
    for name, value in slurm_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield slurm_cluster
    slurm_cluster.clear()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayNodes]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install -e '.[ray]'")
    cluster = RayNodes()
    yield cluster
    cluster.close()


@pytest.fixture
def ray_here(ray_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> RayNodes:
    """`cluster.ray_address = auto` is that cluster."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    return ray_cluster


@pytest.fixture
def hold(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there, the stand-in of the learner continues. Sets a token, and the stand-ins' place."""
    stubs = tmp_path / "stubs"
    for path, source in {
        "vllm/__init__.py": "",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": FAKE_VLLM,
        "sitecustomize.py": IN_PLACE_OF_THE_LEARNER,
        "learner_run.py": LEARNER,
    }.items():
        file = stubs / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    held = tmp_path / "hold"
    held.touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stubs), str(ROOT)]))
    monkeypatch.setenv("HOLD", str(held))
    monkeypatch.setenv("SLIPSTREAM_TOKEN", SECRET)
    return held
