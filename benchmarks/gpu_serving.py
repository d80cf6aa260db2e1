"""The section of `benchmarks.gpu_day` for machines with vLLM on GPUs: a whole run of the starter task by transport."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Of weight_sync.transport. A machine that cannot carry one says so, which is its result.
TRANSPORTS = ("auto", "http", "gloo")

STEPS = 20

# Steps at the start that compile, capture graphs and fill the pipeline.
WARM_UP = 5

# Metrics of a step whose median is a figure, by the figure's name.
MEDIANS = {
    "s a step": "step_time",
    "train s": "train_s",
    "learner blocked ms": "publish_blocked_ms",
    "transfer s": "weight_sync/transfer_s",
    "pause s": "weight_sync/pause_s",
    "bytes": "weight_sync/whole_bytes",
    "mfu": "mfu",
    "probe nats": "weight_sync/probe_max_abs_diff",
}


def quickstart(model: str) -> dict[str, Any]:
    """Run the starter task with a model for `STEPS` steps by each transport.

    Raises:
        AssertionError: No transport made a run.
    """
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        _slipstream("init", folder, "--model", model)
        for transport in TRANSPORTS:
            overrides = {"run.name": transport, "run.dir": folder, "learner.steps": str(STEPS)}
            overrides |= {"weight_sync.transport": transport, "learner.checkpoint_every": "0"}
            options = [part for name, value in overrides.items() for part in (f"--{name}", value)]
            ended = _slipstream("up", f"{folder}/run.toml", *options, check=False)
            file = Path(folder, transport, "metrics.jsonl")
            if ended.returncode or not file.exists():
                figures[transport] = {"failed": ended.stderr.strip()[-300:]}
                continue
            steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            figures[transport] = of_steps(steps)
    if not any("s a step" in found for found in figures.values()):
        raise AssertionError(f"no run came to its end: {figures}")
    return figures


def of_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of a run from its metrics by step, without the first `WARM_UP` steps."""
    steady = steps[WARM_UP:]
    figures = {
        name: float(statistics.median(values))
        for name, metric in MEDIANS.items()
        if (values := [step[metric] for step in steady if step.get(metric) is not None])
    }
    seconds = sum(step["step_time"] for step in steady)
    figures["sampled tokens/s"] = sum(step["tokens_sampled"] for step in steady) / seconds
    figures["trained tokens/s"] = sum(step["tokens_trained"] for step in steady) / seconds
    return figures


def _slipstream(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream.deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)
