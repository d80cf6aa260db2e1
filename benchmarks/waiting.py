"""Measures the cost of waiting: the multiply example unchanged, with a judge of 1 s, and with a heavy-tailed tool.

    python -m benchmarks.waiting [--old CHECKOUT] [--rounds 2] [--steps 26] [--first 6] [--model FOLDER]

Runs use a real vLLM, one after the other. Each round runs every way once, and the order rotates from round to round.
With `--old`, another checkout of Slipstream runs the same ways in between. It also runs the tail with
`worker.episodes = 512`, which it needed for its best speed.

Prints a JSON line for each run, with seconds per step from step `--first` on. Prints at the end, for each way, the
medians over the rounds and the ratios of seconds per step: to the same checkout's unchanged example, and to the best of
the old tail.
Times on a shared machine differ from round to round: look at the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "multiply"
TASKS = ROOT / "benchmarks" / "waiting_tasks.py"
# Each way's task, and the slots of its worker; None keeps the example's.
WAYS: dict[str, tuple[str, int | None]] = {
    "as it stands": ("task", None),
    "judge": ("judged", None),
    "tail": ("tail", None),
    "tail, 512 episodes": ("tail", 512),
}
OLD_ONLY = "tail, 512 episodes"
SHOWN = ("learner_wait_share", "worker_wait_share", "staleness_mean", "staleness_max", "groups_trained")


def run(checkout: Path, way: str, arguments: argparse.Namespace, seed: int = 0) -> dict[str, Any]:
    """Run `checkout` once with a way and return its figures. Its output goes to stderr."""
    task, episodes = WAYS[way]
    with tempfile.TemporaryDirectory() as runs:
        given = {
            "run.name": "waiting",
            "run.dir": runs,
            "run.seed": seed,
            "model.path": arguments.model.resolve(),
            "task.path": f"{TASKS}:{task}",
            "learner.steps": arguments.steps,
            "learner.checkpoint_every": 0,
            "queue.port": arguments.ports[0],
            "vllm.port": arguments.ports[1],
            **({} if episodes is None else {"worker.episodes": episodes}),
        }
        options = [text for key, value in given.items() for text in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "slipstream.deploy", "up", str(EXAMPLE / "run.toml"), *options]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr, check=True)
        folder = Path(runs) / "waiting"
        summary = json.loads((folder / "summary.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_time"] for line in lines if line["step"] >= arguments.first]
    figures = {"step_s": statistics.mean(seconds), "step_s_median": statistics.median(seconds)}
    return {**figures, **{name: summary[name] for name in SHOWN}, "dropped": sum(summary["groups_dropped"].values())}


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Divide the seconds per step of the ways.

    Args:
        found: Figures by "CHECKOUT: WAY".

    Returns:
        Ratios by "numerator / denominator", to three digits.
    """
    result = {}
    for name, figures in found.items():
        whose, _, way = name.partition(": ")
        if way != "as it stands":
            result[f"{name} / as it stands"] = figures["step_s"] / found[f"{whose}: as it stands"]["step_s"]
    best = found.get(f"old: {OLD_ONLY}")
    if best is not None:
        result["new: tail / the old tail's best"] = found["new: tail"]["step_s"] / best["step_s"]
        result["new / old as it stands"] = found["new: as it stands"]["step_s"] / found["old: as it stands"]["step_s"]
    return {name: round(ratio, 3) for name, ratio in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="another checkout, run with the same Python")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--first", type=int, default=6)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "models" / "seed-0")
    parser.add_argument("--ports", type=int, nargs=2, default=(8410, 8420), help="of the queue and of vLLM")
    arguments = parser.parse_args()
    build = [sys.executable, str(EXAMPLE / "build_model.py"), "--out", str(arguments.model.resolve()), "--seed", "0"]
    subprocess.run(build, stdout=sys.stderr, check=True)
    runs = [("new", ROOT, way) for way in WAYS if way != OLD_ONLY]
    if arguments.old is not None:
        old = [("old", arguments.old.resolve(), way) for way in WAYS]
        runs = [one for pair in zip(old, [*runs, None], strict=True) for one in pair if one is not None]
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for whose, checkout, way in runs[number % len(runs) :] + runs[: number % len(runs)]:
            figures = run(checkout, way, arguments)
            found.setdefault(f"{whose}: {way}", []).append(figures)
            print(json.dumps({"checkout": whose, "way": way, "round": number, **figures}), flush=True)
    medians = {
        name: {figure: round(statistics.median(one[figure] for one in of), 3) for figure in of[0]}
        for name, of in found.items()
    }
    print(json.dumps({"medians": medians, "ratios": ratios(medians)}, indent=2))


if __name__ == "__main__":
    main()
