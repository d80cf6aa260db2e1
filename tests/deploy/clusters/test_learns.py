"""Multiply is learnt with real vLLM under a real SLURM and a real Ray, from the same run file, while the fleet changes.

It takes some ten minutes each: `pytest -m slurm --all tests/deploy/clusters/test_learns.py`, and the same with ray.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from slipstream.deploy.clusters import slurm
from slipstream.protocol import checkpoints
from slipstream.protocol.config import load
from tests.deploy.clusters.conftest import SECRET
from tests.deploy.typed import Typed, output
from tests.kit.ports import free_port
from tests.nights import fleet
from tests.nights.audit import of_files

# Stopped, and started again, after the checkpoint of this step.
STEPS, AGAIN_AFTER = 40, 20

CLUSTER = """
[cluster]
server_cpus = 1
worker_cpus = 1
head_cpus = 4
"""

# Two servers compile and start on two cores.
WITHIN_S = 600.0

pytestmark = [pytest.mark.timeout(2400), pytest.mark.wide]


def until(true: Callable[[], object], up: Typed) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not true():
        assert up.poll() is None, up.communicate()[0]
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.5)


@pytest.mark.parametrize(
    "on", [pytest.param("slurm", marks=pytest.mark.slurm), pytest.param("ray", marks=pytest.mark.ray)]
)
def test_multiply_is_learnt_while_a_worker_comes_a_server_drains_and_the_job_is_queued_again(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    cluster = request.getfixturevalue(f"{on}_here")
    monkeypatch.setenv("SLIPSTREAM_TOKEN", SECRET)
    model = fleet.EXAMPLE / "models" / "seed-0"
    subprocess.run([sys.executable, str(fleet.EXAMPLE / "build_model.py"), "--out", str(model)], check=True)
    shutil.copy(fleet.EXAMPLE / "task.py", tmp_path)
    text = (fleet.EXAMPLE / "run.toml").read_text(encoding="utf-8").replace("./models/seed-0", str(model))
    text = text.replace("steps = 40", f"steps = {STEPS}").replace("checkpoint_every = 20", "checkpoint_every = 10")
    text = text.replace("[vllm]", f"[vllm]\ncount = 2\nport = {fleet.consecutive_ports(2)}")
    text = text.replace('name = "quickstart"', f'name = "quickstart"\ndir = "{tmp_path}/runs"')
    text = text.replace("[queue]", f"[queue]\nport = {free_port()}")
    run_file = tmp_path / "run.toml"
    run_file.write_text(text + CLUSTER, encoding="utf-8")
    run_dir = tmp_path / "runs" / "quickstart"
    stored = str(run_dir / "run.toml")

    def seen() -> dict[str, str]:
        """The servers' states and the workers, by name."""
        code, said = output("status", stored, "--json")
        status = json.loads(said) if code == 0 else {"servers": [], "workers": []}
        workers = {worker["worker_id"]: "here" for worker in status["workers"] if worker["seen_s_ago"] < 15}
        return workers | {server["name"]: server["state"] for server in status["servers"]}

    joined: list[Typed] = []
    up = Typed("up", str(run_file), "--on", on)
    try:
        until(lambda: seen().get("vllm-0") == seen().get("vllm-1") == "serving", up)
        if on == "slurm":
            code, script = output("render", "slurm", str(run_file), "--workers", "1")
            assert code == 0, script
            more = f"worker-{slurm.submit(script)}-0"
        else:
            more = "worker-more"
            joined.append(Typed("worker", stored, "--name", more))
        until(lambda: more in seen(), up)
        code, said = output("servers", "remove", "vllm-1", "--force", "--queue", load(run_file).queue.address)
        assert code == 0, said
        until(lambda: "vllm-1" not in seen(), up)
        until(lambda: max(checkpoints.complete(run_dir), default=0) >= AGAIN_AFTER, up)
        if on == "slurm":
            components = cluster.run("squeue", "--noheader", "--name=slipstream-quickstart", "--format=%i")
            cluster.run("scontrol", "requeue", components.split("+")[0].strip())
        else:
            up.send_signal(signal.SIGINT)
            told, _ = up.communicate(timeout=WITHIN_S)
            assert up.returncode == 130, told
            up = Typed("up", str(run_file), "--on", on, "--resume")
        told, _ = up.communicate(timeout=2 * WITHIN_S)
        assert up.returncode == 0, told
        assert "resuming from step" in told
    finally:
        up.terminate()
        for each in joined:
            each.terminate()
            each.communicate(timeout=60)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    print(f"{on}: reward {mean(rewards[:5]):.3f} to {mean(rewards[-5:]):.3f}, best five {best(rewards):.3f}")
    assert best(rewards) >= 0.9
    assert of_files(run_dir, STEPS) == []


def best(rewards: list[float]) -> float:
    """Return the highest mean of five steps."""
    return max(mean(rewards[at : at + 5]) for at in range(len(rewards) - 4))
