"""Measures an optimiser step: ours, a plain padded Hugging Face loop, and TRL 1.16.0's own learner.

All run in turn on the same batches and weights.

    python -m benchmarks.learner --json [--cases short mixed] [--models 0.4M] [--rounds 5] [--quick]

On a CPU, times are CPU seconds of one thread pinned to a core, from samples on the host to new weights, as medians over
rounds; the process keeps the pages that it frees, as a learner on a CPU does. A GPU is used if there is one. There,
times are seconds, with peak memory. `--peak-tflops` of the card adds the share of the time that the model's products
take (MFU).

trl_ratio: Ours / TRL's; null without trl (extra `bench`).
padded_ratio: The padded loop's / ours.
floor_ratio: Ours / the model's matrix products alone (`benchmarks.learner_floor`), in the same rounds.
agrees: Whether all ways have the same loss and gradient, except for rounding.
gradient_difference: Norm of the largest difference to our gradient, divided by the norm of ours.
head_*: See `benchmarks.head`.
rank_*: See `benchmarks.learner_ranks`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.learner_cases import CASES, SIZES, Shape, Size, batch
from benchmarks.learner_floor import Floor
from benchmarks.learner_ways import Ours, Padded, Way
from slipstream.deploy.servers.vllm_server import KEPT_PAGES
from slipstream.protocol.config import LearnerSection

# Differences of gradients divided by their norm, float32 on a CPU. In bfloat16 a token at the clip's edge may flip.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}


@dataclass(frozen=True)
class Measured:
    """Holds the measurement of one way.

    Attributes:
        seconds: Median of a step.
        peak_mib: Peak memory on a GPU, MiB; 0 on a CPU.
        loss: Loss of the first step.
        gradient: Gradient of the first step.
        forwarded: Tokens that a step runs through the model.
    """

    seconds: float
    peak_mib: float
    loss: float
    gradient: torch.Tensor
    forwarded: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = ["0.6B"] if device.type == "cuda" else ["0.4M", "7M"]
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", nargs="+", choices=SIZES, default=models)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--token-budget", type=int, default=LearnerSection().token_budget)
    parser.add_argument("--core", type=int, default=0, help="the core that the process stays on")
    parser.add_argument("--peak-tflops", type=float, help="of the GPU, for MFU")
    parser.add_argument("--quick", action="store_true", help="under a minute: small batches, the smallest model")
    parser.add_argument("--compute", choices=["bfloat16"], help="ours alone, with products in this type")
    arguments = parser.parse_args()
    if device.type == "cpu" and not KEPT_PAGES.items() <= os.environ.items():  # malloc reads them at its start
        again = [sys.executable, "-m", "benchmarks.learner", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **KEPT_PAGES})
    whole = device.type == "cpu" and arguments.compute is None
    ranks = _ranks(arguments.quick) if whole else {}
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {arguments.core})
    if arguments.quick:
        arguments.models, arguments.rounds = arguments.models[:1], 3
    results = {
        f"{model} {case}": compare(
            *(_shape(CASES[case], SIZES[model], arguments.quick), SIZES[model], arguments.token_budget),
            *(arguments.rounds, device, arguments.peak_tflops),
            None if arguments.compute is None else getattr(torch, arguments.compute),
        )
        for model in arguments.models
        for case in arguments.cases
    }
    head = _head(2048 if arguments.quick else 8192) if whole else {}
    if arguments.json:
        unit = "seconds" if device.type == "cuda" else "CPU seconds, one thread"
        print(
            json.dumps(
                {"unit": unit, "token_budget": arguments.token_budget, "cases": results, **head, **ranks}, indent=2
            )
        )
    else:
        _print_table(results, head | ranks)


def _shape(shape: Shape, size: Size, quick: bool) -> Shape:
    return shape.smaller(size.parts * (4 if quick else 1))


def _head(tokens: int) -> dict[str, Any]:
    """Run `benchmarks.head` and return its output."""
    command = [sys.executable, "-m", "benchmarks.head", "--tokens", str(tokens)]
    figures: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return figures


def _ranks(quick: bool) -> dict[str, Any]:
    """Run `benchmarks.learner_ranks` and return its output; empty if two ranks would share a core."""
    if (os.cpu_count() or 1) < 2:
        return {}
    small = ["--model", "0.4M", "--rounds", "3"] if quick else []
    command = [sys.executable, "-m", "benchmarks.learner_ranks", *small]
    figures: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return figures


def compare(
    shape: Shape,
    size: Size,
    budget: int,
    rounds: int,
    device: torch.device,
    peak_tflops: float | None = None,
    compute: torch.dtype | None = None,
) -> dict[str, Any]:
    """Measure one case and model, and return the figures by name."""
    step = batch(shape, size.config["vocab_size"])
    if compute is not None:
        return _alone(Ours(size, step, budget, device, compute), compute, rounds, device)
    kinds: list[Callable[..., Way]] = [Padded]
    if importlib.util.find_spec("trl") is not None:
        from benchmarks.learner_trl import Trl

        kinds.append(Trl)
    learner = Ours(size, step, budget, device)
    ways: dict[str, Way] = {
        "ours": learner,
        **{way.name: way for way in (kind(size, step, budget, device) for kind in kinds)},
    }
    measured = dict(zip(ways, measure(list(ways.values()), rounds, device), strict=True))
    against = _alone(learner, next(learner.model.parameters()).dtype, rounds, device)
    ours, trl = measured["ours"], measured.get("trl")
    loss, gradient = _differences(ours, list(measured.values()))
    weights = sum(parameter.numel() for parameter in ways["ours"].model.parameters())
    return {
        "trl_ratio": round(ours.seconds / trl.seconds, 3) if trl else None,
        "padded_ratio": round(measured["padded"].seconds / ours.seconds, 3),
        "floor_ratio": against["floor_ratio"],
        "agrees": max(loss, gradient) < TOLERANCE[device.type],
        "loss_difference": loss,
        "gradient_difference": gradient,
        "seconds": {name: round(of.seconds, 4) for name, of in measured.items()},
        "tokens_raw": step.raw,
        "tokens_forwarded": {name: of.forwarded for name, of in measured.items()},
        "tokens_trained": int(step.rollouts.tokens.sum()),
        "parameters": weights,
        **({"peak_mib": {name: round(of.peak_mib) for name, of in measured.items()}} if device.type == "cuda" else {}),
        # Forward and backward take 6 operations per weight and token. Attention is left out.
        **({"mfu": 6e-12 * weights * ours.forwarded / ours.seconds / peak_tflops} if peak_tflops else {}),
    }


def _alone(ours: Ours, dtype: torch.dtype, rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure our step and its matrix products in turn."""
    floor = Floor(ours.model, ours.rows(), dtype, device)
    ours.step()
    floor.step()
    pairs = [(_seconds(ours, device), _seconds(floor, device)) for _ in range(rounds)]
    steps, floors = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "floor_ratio": round(statistics.median(step / least for step, least in pairs), 3),
        "seconds": {"ours": round(steps, 4), "floor": round(floors, 4)},
        "tokens_forwarded": {"ours": ours.forwarded},
    }


def measure(ways: Sequence[Way], rounds: int, device: torch.device) -> list[Measured]:
    """Measure all ways: every way makes a step in each round, and the first way rotates. One step before warms up."""
    firsts = [first_step(way) for way in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    peaks = [0.0 for _ in ways]
    for turn in range(rounds):
        for place in range(len(ways)):
            i = (turn + place) % len(ways)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds[i].append(_seconds(ways[i], device))
            peaks[i] = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return [
        Measured(statistics.median(taken), peak, loss, gradient, way.forwarded)
        for way, taken, peak, (loss, gradient) in zip(ways, seconds, peaks, firsts, strict=True)
    ]


def first_step(way: Way) -> tuple[float, torch.Tensor]:
    """Make a step; return its loss and the gradient that the optimiser saw, of all weights in one tensor."""
    seen: list[torch.Tensor] = []

    def look(*_: Any) -> None:
        seen.extend(parameter.grad.flatten().float().clone() for parameter in way.model.parameters())

    hook = way.optimiser.register_step_pre_hook(look)
    loss = way.step()
    hook.remove()
    return loss, torch.cat(seen)


def _seconds(way: Way | Floor, device: torch.device) -> float:
    if device.type == "cpu":
        began = time.process_time()
        way.step()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    way.step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _differences(ours: Measured, others: Sequence[Measured]) -> tuple[float, float]:
    """Return the largest differences to ours, of the losses and of the gradients.

    The difference of the gradients is divided by the norm of ours.
    """
    losses = max(abs(other.loss - ours.loss) for other in others)
    norms = max(float((other.gradient - ours.gradient).norm()) for other in others)
    return losses, norms / float(ours.gradient.norm())


def _print_table(results: dict[str, Any], head: dict[str, Any]) -> None:
    for name, of in results.items():
        seconds = ", ".join(f"{way} {taken:.3f} s" for way, taken in of["seconds"].items())
        floor = f"floor_ratio {of['floor_ratio']:.2f}"
        if "trl_ratio" not in of:
            print(f"{name:24} {seconds}; {floor}")
            continue
        trl = "no trl" if of["trl_ratio"] is None else f"trl_ratio {of['trl_ratio']:.2f}"
        print(f"{name:24} {seconds}; {trl}, padded_ratio {of['padded_ratio']:.2f}, {floor}, agrees {of['agrees']}")
    for name, figure in head.items():
        print(f"{name} {figure}")


if __name__ == "__main__":
    main()
