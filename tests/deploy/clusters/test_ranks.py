"""A learner of two ranks, one of which is killed, under each engine. Servers are fakes with real weights, all else is
real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slipstream.protocol import checkpoints
from tests.deploy.typed import Typed
from tests.nights.audit import of_files

STEPS = 12
# Ranks load torch, several at a time on few cores.
WITHIN_S = 200.0

pytestmark = [pytest.mark.timeout(400)]


def of_run(folder: Path) -> dict[int, tuple[str, str]]:
    """Return the role of each process of the run that lives, and its rank if it is one of the learner's."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if words[:1] == ["srun"] or str(folder) not in str([*words, environment.get("PYTHONPATH")]):
            continue
        if words[1:4] == ["-P", "-m", "slipstream.deploy.cli"] and words[4] != "up":
            found[process.pid] = (words[4], environment.get("RANK", "0"))
        elif words[1:5] == ["-P", "-m", "slipstream.learner", "--rank"]:
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
        pytest.param("local", "1", marks=pytest.mark.wide),
        pytest.param("slurm", "1", marks=pytest.mark.slurm),
        pytest.param("slurm", "0", marks=pytest.mark.slurm),
        pytest.param("ray", "1", marks=pytest.mark.ray),
    ],
)
def test_a_rank_that_is_killed_restarts_all_ranks_and_the_rest_of_the_run_goes_on(
    on: str, rank: str, example: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run_dir, words = tmp_path / "runs" / "example", [*example, "--learner.ranks", "2", "--learner.steps", str(STEPS)]
    if on != "local":
        request.getfixturevalue(f"{on}_here")
        words += ["--cluster.learner_nodes", "2"]
    if on == "ray":
        words += ["--cluster.ray_env", '["PYTHONPATH", "OMP_NUM_THREADS"]']
    with Typed("up", str(tmp_path / "run.toml"), "--on", on, *words) as up:
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
