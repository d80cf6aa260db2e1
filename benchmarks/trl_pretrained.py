"""Compares a pretrained model's way to 0.8 with that of TRL's AsyncGRPOTrainer, on examples/pretrained.

    python -m benchmarks.trl_pretrained [--seeds 0 1 2] [--steps 40] [--every 5] [--sides slipstream trl "trl, bounded"]

Both sides have the same model folder, rows, reward, groups, learning rate, server flags (those that Slipstream
derives), and type: weights in float32 with autocast to bfloat16 and a server in bfloat16 where the CPU multiplies in
it, else float32 everywhere. The server has one half of the cores, everything else the other. Optimiser, loss and
treatment of groups with equal rewards are each side's own defaults. TRL also runs with a bound of generation that is
set by hand, so that what is in flight and queued is within `max_staleness` steps. `benchmarks.trl_on_cpu` replaces what
TRL needs a GPU for. TRL has no gradient checkpointing here, and rows of `--micro` rollouts: 16, 32 and 64 divide a
step.

Every few steps both save their weights by one callback; the seconds of it are left out everywhere. Afterwards plain
transformers answers the held-out questions with each of these weights, greedily.

Prints a JSON line for each run:

- `minutes` to 0.8 since the first step began, `minutes_whole` since the command, with the start of server and trainer.
  None if no saved weights are that good. TRL starts its rollout process within its first step; Slipstream's worker may
  have sampled the first groups before.
- `step_s`: from the second step on. `tokens_s`: sampled tokens of the rollouts that steps took, trained or not.
- `dropped_share`: rollouts that were too old. `success`: by step; 0 is the model as it was.
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
from pathlib import Path
from typing import Any

from benchmarks.saved_weights import Times, successes
from benchmarks.trl_async import TRL_WORKER, WORKER_EXTENSION, serving
from slipstream.deploy.servers import devices, vllm_server
from slipstream.protocol.config import RunConfig, load
from slipstream.protocol.config.text import to_toml

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pretrained"
TARGET = 0.8

# Rollouts in flight, and in TRL's queue; None keeps TRL's own.
BOUNDS = {"trl": None, "trl, bounded": (128, 128), "trl, slipstream.servers": None}
SIDES = ("slipstream", *BOUNDS)

# TRL with Slipstream's publication in place of its own.
OUR_PUBLICATION = "trl, slipstream.servers"

# Steps until Slipstream's own first evaluation: more than a run has.
NEVER = 10**6

# Of both servers, whatever Slipstream would choose.
SERVER_ARGS = ["--block-size", "32"]

# Flags of vLLM that only Slipstream's processes use, and their number of values.
OUR_FLAGS = {
    "--served-model-name": 1,
    "--weight-transfer-config": 1,
    "--middleware": 1,
    "--worker-extension-cls": 1,
    "--enable-scale-out": 0,
}


def settings(arguments: argparse.Namespace, seed: int, folder: Path) -> list[str]:
    """Return the settings of a run on the command line: those of the example without its own evaluations."""
    given = {
        "run.name": "side",
        "run.dir": folder,
        "run.seed": seed,
        "model.path": arguments.model.resolve(),
        "task.path": f"{EXAMPLE / 'task.py'}:task",
        "learner.steps": arguments.steps,
        "learner.checkpoint_every": 0,
        "learner.checkpoint_minutes": 0,
        "learner.callbacks": json.dumps([f"{ROOT / 'benchmarks' / 'saved_weights.py'}:saved"]),
        "eval.at_start": "false",
        "eval.at_end": "false",
        "eval.every": NEVER,
        "queue.port": arguments.ports[0],
        "vllm.port": arguments.ports[1],
        "vllm.args": json.dumps(SERVER_ARGS),
        **({} if arguments.dtype is None else {"model.dtype": arguments.dtype}),
    }
    return [text for key, value in given.items() for text in (f"--{key}", str(value))]


def run_slipstream(given: list[str], config: RunConfig, environment: dict[str, str]) -> dict[str, Any]:
    """Run Slipstream once and return its figures."""
    command = [sys.executable, "-m", "slipstream.deploy", "up", str(EXAMPLE / "run.toml"), *given]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=True)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    dropped: dict[str, int] = {}
    for line in lines:
        for reason, groups in line["groups_dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + groups
    stale = sum(groups for reason, groups in dropped.items() if reason != "zero_variance")
    return {
        "tokens": sum(line["tokens_sampled"] for line in lines),
        "dropped_share": stale / (stale + config.learner.groups_per_step * len(lines)),
        "wait_s": sum(line["wait_s"] for line in lines),
        "staleness_mean": statistics.mean(line["staleness_mean"] for line in lines),
        "reward_first": lines[0]["reward"],
        "reward_last": statistics.mean(line["reward"] for line in lines[-5:]),
    }


def server_command(config: RunConfig, our_publication: bool) -> list[str]:
    """Return Slipstream's command of the run's server without what only Slipstream's processes use.

    Args:
        our_publication: Whether it is given weights by `slipstream.servers`, which needs the rest.
    """
    if our_publication:
        command = vllm_server.command(vllm_server.with_cpu_settings(config), 0)
        ours = {"--served-model-name": str(config.model.path), "--worker-extension-cls": f"{TRL_WORKER}.WithSlipstream"}
        for flag, value in ours.items():
            command[command.index(flag) + 1] = value
        return command
    words = iter(vllm_server.command(vllm_server.with_cpu_settings(config), 0))
    kept = []
    for word in words:
        if word in OUR_FLAGS:
            for _ in range(OUR_FLAGS[word]):
                next(words)
        else:
            kept.append(word)
    return [*kept, "--worker-extension-cls", WORKER_EXTENSION]


def run_trl(side: str, config: RunConfig, micro: int, environment: dict[str, str]) -> dict[str, Any]:
    """Run TRL once and return its figures. Its output goes to stderr."""
    placement = devices.place_devices(sorted(os.sched_getaffinity(0)), servers=1)
    assert placement is not None, "one core: the comparison needs two"
    bounds, port, folder = BOUNDS[side], config.vllm.port, Path(environment["SAVED_IN"])
    run, out = folder / "run.toml", folder / "figures.json"
    run.write_text(to_toml(config))
    served = {"OMP_NUM_THREADS": str(placement.server_threads), "PYTHONPATH": str(ROOT)}
    ours = side == OUR_PUBLICATION
    with serving(server_command(config, ours), vllm_server.environment(config) | served, port, placement.servers):
        command = [
            *(sys.executable, "-m", "benchmarks.trl_pretrained_script", "--run", str(run), "--out", str(out)),
            *("--server", f"http://127.0.0.1:{port}", "--micro", str(micro)),
            *("--transfer", "slipstream" if ours else "file"),
            *(() if bounds is None else ("--inflight", str(bounds[0]), "--queue", str(bounds[1]))),
        ]
        wanted = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)]), "HF_HUB_OFFLINE": "1"}
        wanted |= {"OMP_NUM_THREADS": str(len(placement.others)), **vllm_server.KEPT_PAGES}
        trainer = subprocess.Popen(command, cwd=ROOT, env=environment | wanted, stdout=sys.stderr)
        os.sched_setaffinity(trainer.pid, placement.others)
        if trainer.wait():
            raise SystemExit(f"{side}: TRL ended with code {trainer.returncode}: see its output above")
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def measure(side: str, seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a side once, evaluate its weights, and return all figures."""
    given = settings(arguments, seed, folder)
    _, config = devices.settle(load(EXAMPLE / "run.toml", given), vllm_server.on_cpu(), lambda line: None)
    dtype = config.model.dtype
    environment = {**os.environ, "SAVED_IN": str(folder), "SAVED_EVERY": str(arguments.every), "SAVED_DTYPE": dtype}
    launched = time.time()
    if side == "slipstream":
        figures = run_slipstream(given, config, environment)
    else:
        figures = run_trl(side, config, arguments.micro, environment)
    times = Times.read(folder, launched)
    import task as example

    held_out = example.questions[: example.HELD_OUT]
    tokens = config.rollout.max_turn_tokens
    success = successes(folder, arguments.model, dtype, held_out, tokens, example.correct)
    reached = next((times.ended[step - 1] for step, share in success.items() if step and share >= TARGET), None)
    training_s = times.ended[-1] - times.began
    return {
        "dtype": dtype,
        "minutes": None if reached is None else (reached - times.began) / 60,
        "minutes_whole": None if reached is None else (reached - times.launched) / 60,
        "step_s": (times.ended[-1] - times.ended[0]) / max(1, len(times.ended) - 1),
        "tokens_s": figures.pop("tokens") / training_s,
        "wait_share": figures.pop("wait_s") / training_s,
        **figures,
        "success": success,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluated weights")
    parser.add_argument("--sides", nargs="+", default=list(SIDES[:3]), choices=SIDES)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of both sides; left out: by the CPU")
    parser.add_argument("--micro", type=int, default=32, help="rollouts of a forward pass of TRL")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "models" / "smollm2-135m")
    parser.add_argument("--ports", type=int, nargs=2, default=(8450, 8460), help="of the queue and of vLLM")
    arguments = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE))
    for seed in arguments.seeds:
        for side in arguments.sides:
            with tempfile.TemporaryDirectory() as folder:
                figures = measure(side, seed, arguments, Path(folder))
            rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
            print(json.dumps({"side": side, "seed": seed, **rounded}), flush=True)


if __name__ == "__main__":
    main()
