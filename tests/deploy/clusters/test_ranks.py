"""A learner of two ranks, one of which is killed, under each engine. Servers are fakes with real weights, all else is
real."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from protocol import access, checkpoints
from tests.deploy.clusters.typed import slipstream
from tests.kit.ports import free_port
from tests.nights.audit import of_files
from tests.nights.fleet import EXAMPLE, FAKE_VLLM, ROOT, save_model

STEPS = 12
# Ranks load torch, several at a time on few cores.
WITHIN_S = 200.0
SECRET = "0123456789abcdef0123456789abcdef"

pytestmark = [pytest.mark.timeout(400)]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of a run of the example in `tmp_path`, whose processes find the fake server in place of vLLM."""
    stub = tmp_path / "stubs" / "vllm" / "entrypoints" / "openai"
    stub.mkdir(parents=True)
    for folder in (stub, stub.parent, stub.parent.parent):
        (folder / "__init__.py").touch()
    (stub / "api_server.py").write_text(FAKE_VLLM, encoding="utf-8")
    save_model(tmp_path / "model")
    shutil.copy(EXAMPLE / "run.toml", tmp_path / "run.toml")
    shutil.copy(EXAMPLE / "task.py", tmp_path / "task.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stubs"), str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(access.TOKEN_VARIABLE, SECRET)
    return [
        *("--run.name", "ranks", "--run.dir", str(tmp_path / "runs"), "--model.path", str(tmp_path / "model")),
        *("--queue.port", str(free_port()), "--vllm.port", str(free_port()), "--weight_sync.transport", "http"),
        *("--rollout.group_size", "4", "--learner.groups_per_step", "4", "--learner.checkpoint_every", "2"),
        *("--worker.episodes", "32", "--worker.count", "1", "--learner.ranks", "2", "--learner.steps", str(STEPS)),
        *("--cluster.server_cpus", "1", "--cluster.worker_cpus", "1", "--cluster.head_cpus", "6"),
    ]


def of_run(folder: Path) -> dict[int, tuple[str, str]]:
    """Return the role of each process of the run that lives, and its rank if it is one of the learner's."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if words[:1] == ["srun"] or str(folder) not in str([*words, environment.get("PYTHONPATH")]):
            continue
        if words[1:4] == ["-P", "-m", "deploy.cli"] and words[4] != "up":
            found[process.pid] = (words[4], environment.get("RANK", "0"))
        elif words[1:5] == ["-P", "-m", "learner", "--rank"]:
            found[process.pid] = ("learner", environment["RANK"])
    return found


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("on", "rank"),
    [
        ("local", "1"),
        pytest.param("slurm", "1", marks=pytest.mark.slurm),
        pytest.param("slurm", "0", marks=pytest.mark.slurm),
        pytest.param("ray", "1", marks=pytest.mark.ray),
    ],
)
def test_a_rank_that_is_killed_restarts_all_ranks_and_the_rest_of_the_run_goes_on(
    on: str, rank: str, settings: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """I1, I2."""
    run_dir, words = tmp_path / "runs" / "ranks", [*settings]
    if on != "local":
        request.getfixturevalue(f"{on}_here")
        words += ["--cluster.learner_nodes", "2"]
    if on == "ray":
        words += ["--cluster.ray_env", '["PYTHONPATH", "OMP_NUM_THREADS"]']
    with slipstream("up", str(tmp_path / "run.toml"), "--on", on, *words) as up:
        try:
            until(lambda: checkpoints.complete(run_dir) or up.poll() is not None)
            before = of_run(tmp_path)
            ranks = {each: pid for pid, (role, each) in before.items() if role == "learner"}
            assert {*ranks} == {"0", "1"}, up.communicate(timeout=WITHIN_S)
            os.kill(ranks[rank], signal.SIGKILL)
            until(lambda: not {*ranks.values()} & of_run(tmp_path).keys())
            until(lambda: "learner" in {role for role, _ in of_run(tmp_path).values()} or up.poll() is not None)
            assert before.keys() - {*ranks.values()} <= of_run(tmp_path).keys(), "another process was ended"
            told, _ = up.communicate(timeout=WITHIN_S)
            assert up.returncode == 0, told
        finally:
            up.terminate()
    assert "starting all ranks of the learner again from the newest checkpoint" in told
    assert "resuming from step" in told
    assert told.count("restart 1 of 3 in a row") == 1
    assert of_files(run_dir, STEPS) == []
