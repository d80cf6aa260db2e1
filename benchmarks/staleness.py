"""Compares algorithms on old data: the multiply task, where the five steps of a publication have staleness 0 to 4.

    python -m benchmarks.staleness [--algorithms grpo rloo ...] [--seeds 0 1] [--steps 80] [--learning-rate R]

A version is published every fifth step (`weight_sync.every = 5`, `queue.max_staleness = 4`, `queue.depth = 5`). A step
therefore trains on data up to four versions old. Runs use a real vLLM, one after the other. A way is a preset of
`learner.algorithm`, or settings; WAYS lists them.

Prints one JSON line per run: rewards as means over ten steps, the number of steps until such a mean is 0.9, and the
metrics of the ratios. A run that makes no step for `--patience` seconds after its first is ended: its policy has
collapsed, so that all rewards of each group are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "multiply"
STALE = {"weight_sync.every": 5, "queue.max_staleness": 4, "queue.depth": 5, "learner.checkpoint_every": 0}
# Settings of [learner].
WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "rloo": {"algorithm": "rloo"},
    "decoupled_ppo": {"algorithm": "decoupled_ppo"},
    "tis": {"algorithm": "tis"},
    # Unclipped importance weighting.
    "importance": {"objective": "importance"},
}
WINDOW = 10
SHOWN = ("grad_norm", "entropy", "kl", "ess", "log_ratio_max", "staleness_mean", "staleness_max")


def run(way: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the task once and return the figures. The run's output goes to stderr."""
    name = f"{way}-{seed}"
    settings = {**STALE, **{f"learner.{key}": value for key, value in WAYS[way].items()}}
    if arguments.learning_rate is not None:
        settings["learner.learning_rate"] = arguments.learning_rate
    with tempfile.TemporaryDirectory() as runs:
        given = {
            "run.name": name,
            "run.dir": runs,
            "run.seed": seed,
            "model.path": EXAMPLE / "models" / f"seed-{seed}",
            "learner.steps": arguments.steps,
            "queue.port": arguments.ports[0],
            "vllm.port": arguments.ports[1],
            **settings,
        }
        options = [text for key, value in given.items() for text in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "slipstream.deploy", "up", str(EXAMPLE / "run.toml"), *options]
        journal = Path(runs) / name / "metrics.jsonl"
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=sys.stderr) as started:
            collapsed = not ends(started, journal, arguments.patience)
        lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    return {"way": way, "seed": seed, "ended": started.returncode, "collapsed": collapsed, **figures(lines)}


def ends(started: subprocess.Popen[bytes], journal: Path, patience_s: float) -> bool:
    """Wait for the run's end.

    Returns:
        False if the run made no step for `patience_s` seconds and was ended.
    """
    while started.poll() is None:
        time.sleep(1)
        if journal.exists() and journal.stat().st_size and time.time() - journal.stat().st_mtime > patience_s:
            started.terminate()
            started.wait()
            return False
    return True


def figures(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures in a run's `metrics.jsonl`."""
    rewards = [line["reward"] for line in lines]
    means = [statistics.mean(rewards[i : i + WINDOW]) for i in range(0, len(rewards) - WINDOW + 1, WINDOW)]
    reached = next((WINDOW * (number + 1) for number, mean in enumerate(means) if mean >= 0.9), None)
    shown = {
        name: {"median": statistics.median(values), "max": max(values)}
        for name in SHOWN
        if (values := [line[name] for line in lines if line.get(name) is not None])
    }
    return {
        "steps": len(lines),
        "rewards": [round(mean, 3) for mean in means],
        "at_0.9_after_steps": reached,
        **shown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--learning-rate", type=float, help="the example's, unless it is given")
    parser.add_argument("--ports", type=int, nargs=2, default=(8300, 8310), help="of the queue and of vLLM")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without a step")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        model = EXAMPLE / "models" / f"seed-{seed}"
        build = [sys.executable, str(EXAMPLE / "build_model.py"), "--out", str(model), "--seed", str(seed)]
        subprocess.run(build, stdout=sys.stderr, check=True)
        for way in arguments.algorithms:
            print(json.dumps(run(way, seed, arguments)), flush=True)


if __name__ == "__main__":
    main()
