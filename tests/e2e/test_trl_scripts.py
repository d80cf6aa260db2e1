"""Scripts for TRL, by another import alone, learn on a real vLLM."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(900)]

SCRIPTS = ROOT / "tests" / "slipstream" / "trl_scripts"
STEPS = 20


NAMES = ["functions", "async_tools", "environment_rewards", "lora", "rloo", "rollout_function"]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_learns(name: str, model_folder: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MODEL": str(model_folder),
        "OUTPUT_DIR": str(tmp_path / "run"),
        "MAX_STEPS": str(STEPS),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py")], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert len(rewards) == STEPS
    first, last = statistics.mean(rewards[:4]), statistics.mean(rewards[-4:])
    print(f"{name}: reward {first:.2f} to {last:.2f}")
    assert last > first + 0.1, (rewards, done.stderr)
