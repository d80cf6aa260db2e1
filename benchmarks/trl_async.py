"""Compares a step's time with that of TRL's AsyncGRPOTrainer, on the multiply example, unchanged and with waits.

    python -m benchmarks.trl_async [--seeds 0 1] [--steps 26] [--first 6] [--ways "as it stands" judge tail]

The ways are those of `benchmarks.waiting`. Both sides have the same tiny policy, data, tools, rewards, groups, learning
rate and server flags, each run starts its own real vLLM, and the runs take turns. TRL runs twice: with its default
bound of generation, and with one that is set by hand so that what is in flight, waiting for its score and queued is
within `max_staleness` steps, as its releases since 1.18 do by themselves (here: 256 + 128 + 128 rollouts).

TRL 1.16 needs a GPU for three things, which `benchmarks.trl_on_cpu` replaces. Everything else is TRL's.

Prints a JSON line for each run, and at the end medians over the seeds with the ratios TRL / Slipstream of seconds per
step.
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
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import waiting
from slipstream.deploy.servers import cpu_build, vllm_server

# Rollouts in flight, and in TRL's queue, by side; None keeps TRL's own.
BOUNDS = {"trl": None, "trl, bounded": (256, 128)}
START_S = 240

TRL_WORKER = "benchmarks.trl_server_worker"
WORKER_EXTENSION = f"{TRL_WORKER}.TiedHead"


def multiply_server(model: Path, port: int, seed: int) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a vLLM server with the example's flags and vLLM's own routes."""
    facts = json.loads((model / "config.json").read_text())
    command = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--port", str(port), "--dtype", "float32", "--seed", str(seed)),
        *("--max-model-len", "512", "--max-num-seqs", "128", "--max-num-batched-tokens", "4096"),
        *("--kv-cache-memory-bytes", "256M", "--block-size", "32", "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm", "--enforce-eager", "--disable-uvicorn-access-log"),
        *("--distributed-executor-backend", vllm_server.IN_ENGINE, *cpu_build.flags(facts)),
        *("--worker-extension-cls", WORKER_EXTENSION),
    ]
    wanted = {
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": str(waiting.ROOT),
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    wanted |= {"VLLM_NO_USAGE_STATS": "1", vllm_server.THREADS_BIND: vllm_server.NO_BIND, **vllm_server.KEPT_PAGES}
    return command, {**os.environ, **wanted}


@contextmanager
def serving(command: list[str], environment: dict[str, str], port: int, cores: Collection[int] = ()) -> Iterator[None]:
    """Run a server until the block ends; it answers when the block begins.

    Args:
        cores: Core numbers that it may use; all of them if empty.
    """
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("vLLM did not start: see its log above") from None
                time.sleep(1.0)
        yield
    finally:
        process.terminate()
        process.wait()


def run_trl(side: str, way: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run TRL once and return its figures. Its output goes to stderr."""
    model = arguments.model.resolve()
    bounds = BOUNDS[side]
    command, environment = multiply_server(model, arguments.ports[1], seed)
    with tempfile.TemporaryDirectory() as folder, serving(command, environment, arguments.ports[1]):
        out = Path(folder) / "figures.json"
        command = [
            *(sys.executable, "-m", "benchmarks.trl_async_script", "--way", way, "--seed", str(seed)),
            *("--steps", str(arguments.steps), "--first", str(arguments.first), "--model", str(model)),
            *("--server", f"http://127.0.0.1:{arguments.ports[1]}", "--out", str(out), "--work", folder),
            *(() if bounds is None else ("--inflight", str(bounds[0]), "--queue", str(bounds[1]))),
        ]
        paths = os.pathsep.join([str(waiting.ROOT), str(waiting.EXAMPLE)])
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, cwd=waiting.ROOT, env=environment, stdout=sys.stderr, check=True)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--first", type=int, default=6)
    parser.add_argument("--ways", nargs="+", default=["as it stands", "judge", "tail"], choices=list(waiting.WAYS))
    parser.add_argument("--sides", nargs="+", default=["slipstream", *BOUNDS], choices=["slipstream", *BOUNDS])
    parser.add_argument("--model", type=Path, default=waiting.EXAMPLE / "models" / "seed-0")
    parser.add_argument("--ports", type=int, nargs=2, default=(8430, 8440), help="of the queue and of vLLM")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for way in arguments.ways:
            for side in arguments.sides:
                if side == "slipstream":
                    figures = waiting.run(waiting.ROOT, way, arguments, seed)
                else:
                    figures = run_trl(side, way, seed, arguments)
                found.setdefault(f"{side}: {way}", []).append(figures)
                print(json.dumps({"side": side, "way": way, "seed": seed, **figures}), flush=True)
    medians = {
        name: {figure: round(statistics.median(one[figure] for one in of), 3) for figure in of[0]}
        for name, of in found.items()
    }
    ratios = {
        name: round(figures["step_s"] / medians[f"slipstream: {name.partition(': ')[2]}"]["step_s"], 2)
        for name, figures in medians.items()
        if not name.startswith("slipstream") and "slipstream" in arguments.sides
    }
    print(json.dumps({"medians": medians, "TRL / Slipstream, seconds per step": ratios}, indent=2))


if __name__ == "__main__":
    main()
