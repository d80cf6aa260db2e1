"""Compares the speed of two checkouts of Slipstream on the quickstart's task, run in turn.

    python benchmarks/side_by_side.py OLD NEW [--seeds 0 1 2] [--steps 60] [--first 6] [--model FOLDER]

OLD and then NEW run each seed, on the same machine, with the same tiny policy, which is built if it is missing. Each
uses the virtual environment in its own `.venv`.

Prints JSON. Each run has the seconds per step from step `--first` on (to leave out start-up effects), reward, staleness
and drops. Each pair has the ratio NEW / OLD of the seconds per step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path("examples") / "multiply"


def run(checkout: Path, model: Path, seed: int, steps: int, first: int) -> dict[str, Any]:
    """Run `checkout` once and return its figures. Its output goes to stderr."""
    name = f"side-by-side-{seed}"
    with tempfile.TemporaryDirectory() as runs:
        environment = {**os.environ, "PATH": f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}"}
        command = [
            *(str(checkout / "deploy" / "launch.sh"), str(checkout / EXAMPLE / "run.toml")),
            *("--run.name", name, "--run.dir", runs, "--run.seed", str(seed), "--model.path", str(model.resolve())),
            *("--learner.steps", str(steps)),
        ]
        subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr, check=True)
        folder = Path(runs) / name
        summary = json.loads((folder / "summary.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # An old checkout calls it `step_s`.
    seconds = [line.get("step_time", line.get("step_s")) for line in lines if line["step"] >= first]
    wanted = (
        *("reward_first10", "reward_last10", "staleness_mean", "staleness_max", "groups_trained", "groups_dropped"),
        *("sync_pause_ms_p50", "probe_max_abs_diff", "worker_cpu_ms_per_episode", "learner_cpu_us_per_trained_token"),
    )
    return {"step_s": statistics.mean(seconds), **{name: summary[name] for name in wanted}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--first", type=int, default=6)
    parser.add_argument("--model", type=Path, help="one tiny policy for all seeds, instead of one for each")
    arguments = parser.parse_args()
    old, new = arguments.old.resolve(), arguments.new.resolve()
    pairs = []
    for seed in arguments.seeds:
        model = arguments.model or new / EXAMPLE / "models" / f"seed-{seed}"
        build = [str(new / ".venv" / "bin" / "python"), str(new / EXAMPLE / "build_model.py")]
        subprocess.run([*build, "--out", str(model.resolve()), "--seed", str(seed)], stdout=sys.stderr, check=True)
        pair: dict[str, Any] = {
            name: run(checkout, model, seed, arguments.steps, arguments.first)
            for name, checkout in (("old", old), ("new", new))
        }
        pair["ratio"] = pair["new"]["step_s"] / pair["old"]["step_s"]
        pairs.append({"seed": seed, **pair})
    ratios = [pair["ratio"] for pair in pairs]
    print(json.dumps({"runs": pairs, "ratio_median": statistics.median(ratios)}, indent=2))


if __name__ == "__main__":
    if shutil.which("bash") is None:
        sys.exit("side_by_side: bash is needed")
    main()
