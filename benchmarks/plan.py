"""Compares plans with runs: the multiply example in ten variants on a real vLLM, each planned from one other run.

    python -m benchmarks.plan [--variants plain staleness_0 ...] [--steps 20] [--keep DIR]
    python -m benchmarks.plan --records DIR ...

Runs the example, whose policy hardly learns here, measures its server with a probe, learns rates from both, and
predicts each variant, which then runs as well. The slow tool sleeps 0.5 s in each call, the slow judge 1 s for each
group; a plan gets these seconds as given, and everything else from the record. With `--records`, predicts runs that
were made before from their own records instead, and runs nothing.

Prints one JSON line per run: predicted and measured values with the error of the prediction, as a share of the measured
value for rates, else as a difference; then a line with the median and the worst error of steps a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.deploy.commands import probe
from slipstream.deploy.planning.calibration import calibrated, sharing_cores
from slipstream.deploy.planning.rates import Measured, Rates, read_record
from slipstream.deploy.planning.simulation import Simulation
from slipstream.protocol.config import RunConfig

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "multiply"
TOOL_S, JUDGE_S = 0.5, 1.0
SEEDS = 8
# So small that lengths and flat groups stay as they are: it is speed that is compared.
LEARNING_RATE = 1e-7

# Settings of each variant.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "staleness_0": {"queue.max_staleness": 0},
    "staleness_2": {"queue.max_staleness": 2},
    "refill": {"learner.zero_variance": "refill"},
    "workers_2": {"worker.count": 2},
    "workers_3": {"worker.count": 3, "worker.episodes": 48},
    "servers_2": {"vllm.count": 2},
    "few_slots": {"worker.episodes": 32},
    "half_batch": {"learner.groups_per_step": 8},
    "slow_tool": {},
    "slow_judge": {},
}
# The task of a variant with a slow part, written next to the run.
SLOW = {
    "slow_tool": f"""
_multiply = task.tools[0]

def multiply(a: int, b: int) -> int:
    time.sleep({TOOL_S})
    return _multiply(a, b)

multiply.__doc__ = _multiply.__doc__
task = dataclasses.replace(task, tools=[multiply])
""",
    "slow_judge": f"""
_accuracy = task.rewards[0]

async def accuracy(**columns):
    await asyncio.sleep({JUDGE_S})
    return _accuracy(**columns)

task = dataclasses.replace(task, rewards=[accuracy])
""",
}
BEGIN = """import asyncio, dataclasses, importlib.util, time

_spec = importlib.util.spec_from_file_location("multiply_task", {path!r})
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
task = _module.task
"""
RATES = ("steps_per_s", "tokens_per_s", "trained_tokens_per_s")
OTHERS = ("staleness_mean", "staleness_max", "learner_wait", "worker_wait")


def run(name: str, folder: Path, model: Path, arguments: argparse.Namespace) -> Path:
    """Run a variant to its end; its output goes to stderr. Returns its run directory."""
    given = {
        "run.name": name,
        "run.dir": folder,
        "model.path": model,
        "learner.steps": arguments.steps,
        "learner.learning_rate": LEARNING_RATE,
        "learner.sample_rollouts": 32,
        "learner.checkpoint_every": 0,
        "queue.port": arguments.ports[0],
        "vllm.port": arguments.ports[1],
        **VARIANTS[name],
    }
    if name in SLOW:
        task = folder / f"{name}.py"
        task.write_text(BEGIN.format(path=str(EXAMPLE / "task.py")) + SLOW[name])
        given["task.path"] = f"{task}:task"
    options = [text for key, value in given.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "slipstream.deploy", "up", str(EXAMPLE / "run.toml"), *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ}, stdout=sys.stderr, check=True)
    return folder / name


def told(name: str, rates: Rates) -> Rates:
    """Return the rates with the seconds that a variant adds to tools or judge."""
    tool_s, judge_s = TOOL_S * (name == "slow_tool"), JUDGE_S * (name == "slow_judge")
    episodes = (
        replace(times, tools_s=times.tools_s + tool_s * (times.turns - 1), judge_s=times.judge_s + judge_s)
        for times in rates.episodes
    )
    return replace(rates, episodes=tuple(episodes))


def compare(name: str, config: RunConfig, rates: Rates, measured: Measured) -> dict[str, Any]:
    """Return the line of a run, whose prediction is a mean over seeds, for as many steps as the run made."""
    predicted = [Simulation(config, rates, seed).run(measured.steps + 1) for seed in range(SEEDS)]
    line: dict[str, Any] = {"run": name}
    for field in (*RATES, *OTHERS):
        guess, seen = statistics.mean(getattr(one, field) for one in predicted), getattr(measured, field)
        if seen is None:
            continue
        error = guess / seen - 1 if field in RATES else guess - seen
        line[field] = {"predicted": round(guess, 4), "measured": round(seen, 4), "error": round(error, 4)}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--records", nargs="+", type=Path, metavar="DIR", help="run directories to predict")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here")
    parser.add_argument("--ports", type=int, nargs=2, default=(8320, 8330), help="of the queue and of vLLM")
    arguments = parser.parse_args()
    lines = []
    if arguments.records:
        for folder in arguments.records:
            record = read_record(folder)
            lines.append(compare(folder.name, record.config, calibrated(record), record.measured))
            print(json.dumps(lines[-1]), flush=True)
    else:
        lines = planned(arguments)
    errors = [abs(line["steps_per_s"]["error"]) for line in lines]
    print(json.dumps({"median_error": statistics.median(errors), "worst_error": max(errors)}), flush=True)


def planned(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the example as it is, then predict and run each variant."""
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = EXAMPLE / "models" / "seed-0"
        build = [sys.executable, str(EXAMPLE / "build_model.py"), "--out", str(model), "--seed", "0"]
        subprocess.run(build, stdout=sys.stderr, check=True)
        first = run("plain", folder, model, arguments)
        probe.measure(read_record(first), first, servers=2)
        learnt = read_record(first)
        rates = calibrated(learnt)
        for name in arguments.variants:
            record = learnt if name == "plain" else read_record(run(name, folder, model, arguments))
            shared = sharing_cores(told(name, rates), learnt.config, record.config)
            lines.append(compare(name, record.config, shared, record.measured))
            print(json.dumps(lines[-1]), flush=True)
    return lines


if __name__ == "__main__":
    main()
