"""Measures how much faster two ranks make a step than one, each with one thread, for `benchmarks.learner`.

    python -m benchmarks.learner_ranks [--case short] [--model 7M] [--rounds 7]

One rank and two ranks make a step in turn in each round. Figures are medians over the rounds. Each rank needs a core
for itself.

rank_speedup: Seconds of a step with one rank, divided by those with two.
rank_seconds: Wall-clock seconds from samples on the host to new weights.
rank_cpu_share: CPU seconds of rank 0 in a step with two ranks, divided by those of one rank alone. 0.5 is ideal. Load
    hardly changes it.
rank_load: Load of the machine at the start (`load`, processes that want to run), and its number of cores (`cores`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner_cases import CASES, SIZES, Batch, batch
from slipstream.learner.feed.packing import pack
from slipstream.learner.ranks import launch
from slipstream.learner.run import build_trainer
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection, RunConfig

RANKS = 2
LONGEST = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="short")
    parser.add_argument("--model", choices=SIZES, default="7M")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.case, arguments.model, arguments.rounds), indent=2))


def measure(case: str, model: str, rounds: int) -> dict[str, Any]:
    """Measure steps with one rank and with two, and end the ranks before returning.

    Args:
        case: Key of CASES.
        model: Key of SIZES.
        rounds: Measured rounds, after one to warm up.

    Returns:
        The figures of the module's docstring, by name.
    """
    load = os.getloadavg()[0]
    os.environ["OMP_NUM_THREADS"] = "1"
    size = SIZES[model]
    work = batch(CASES[case].smaller(size.parts), size.config["vocab_size"])
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        size.build("sdpa", torch.device("cpu")).save_pretrained(folder)
        several = _run_file(Path(folder), RANKS)
        torch.set_num_threads(1)
        alone = build_trainer(_run_file(Path(folder), 1), None)
        with launch.lead_team(several, launch.this_rank(several)) as team:
            together = build_trainer(several, None, team)
            torch.set_num_threads(1)
            seconds: dict[int, list[float]] = {1: [], RANKS: []}
            cpu: dict[int, list[float]] = {1: [], RANKS: []}
            for turn in range(rounds + 1):
                for ranks, trainer in ((1, alone), (RANKS, together)):
                    began, used = time.perf_counter(), time.process_time()
                    _step(trainer, work, ranks)
                    if turn:  # The first round warms up.
                        seconds[ranks].append(time.perf_counter() - began)
                        cpu[ranks].append(time.process_time() - used)
    one, two = (statistics.median(seconds[ranks]) for ranks in (1, RANKS))
    own, share = (statistics.median(cpu[ranks]) for ranks in (1, RANKS))
    return {
        "rank_speedup": round(one / two, 3),
        "rank_seconds": {"one": round(one, 3), "two": round(two, 3)},
        "rank_cpu_share": round(share / own, 3),
        "rank_case": f"{model} {case}",
        "rank_load": {"load": round(load, 2), "cores": os.cpu_count()},
    }


def _run_file(model: Path, ranks: int) -> RunConfig:
    learner = {"ranks": ranks, "learning_rate": 1e-9}
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "task": {"path": "task.py:task"},
            "learner": learner,
            "run": {"dir": str(model)},
        }
    )


def _step(trainer: PolicyTrainer, work: Batch, ranks: int) -> None:
    trainer.step(pack(work.samples, LearnerSection().token_budget, ranks=ranks), work.rollouts)


if __name__ == "__main__":
    main()
