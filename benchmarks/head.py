"""Measures memory and time of the output layer: each token's log-prob and its gradient, in chunks and all at once.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.head [--tokens 8192] [--vocabulary 151936] [--hidden 64]

Chunks are bounded by bytes. Prints one JSON object.

head_peak_mib: Peak memory of tensors beyond inputs and their gradients, counted from the operations that make them.
naive_peak_mib: The same for log_softmax of all logits, computed on the meta device, which takes no memory.
head_peak_ratio: head_peak_mib divided by naive_peak_mib.
rss_mib: Real growth of the process, gradients of the inputs included.
head_time_ratio: CPU seconds with the default size, divided by those of the fastest of `cpu_s`. There, "any" is without
    the bound that keeps a chunk in a CPU's cache.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from slipstream.learner.model import logprobs
from slipstream.learner.model.logprobs import LmHead, token_scores
from slipstream.protocol.config import LearnerSection
from tests.kit.memory import LiveBytes

MIB = 2**20
DEFAULT = LearnerSection().logits_mib
SIZES_MIB = (32, 128, DEFAULT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    shape = arguments.tokens, arguments.vocabulary, arguments.hidden

    torch.set_num_threads(1)
    naive, ours = naive_peak(shape), head_peak(shape)
    bounded = logprobs.CPU_ROWS
    seconds: dict[str, float] = {}
    grown: dict[str, float] = {}
    for _ in range(arguments.rounds):
        for size, any_size in [*((size, False) for size in SIZES_MIB), *((size, True) for size in (DEFAULT, 2048))]:
            name = f"{size}, any" if any_size else str(size)
            logprobs.CPU_ROWS = 10**9 if any_size else bounded
            taken, grown[name] = timed(shape, size)
            seconds[name] = min(taken, seconds.get(name, taken))
    print(
        json.dumps(
            {
                "tokens, vocabulary, hidden": shape,
                "logits_mib": DEFAULT,
                "head_peak_mib": round(ours / MIB),
                "naive_peak_mib": round(naive / MIB),
                "head_peak_ratio": round(ours / naive, 4),
                "head_time_ratio": round(seconds[str(DEFAULT)] / min(seconds.values()), 3),
                "cpu_s": {size: round(taken, 2) for size, taken in seconds.items()},
                "rss_mib": {size: round(more / MIB) for size, more in grown.items()},
            }
        )
    )


def inputs(shape: tuple[int, int, int], device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, vocabulary, width = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) * width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=device)


def timed(shape: tuple[int, int, int], size_mib: int) -> tuple[float, float]:
    """Measure the scores and their gradient with chunks of `size_mib`.

    Args:
        shape: Tokens, vocabulary, hidden size.
        size_mib: Maximum size of a chunk, MiB.

    Returns:
        CPU seconds, and the maximum growth of the process in bytes.
    """
    hidden, weight, targets = inputs(shape)
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak that VmHWM reports.
    before = _status("VmRSS")
    started = time.process_time()
    scores = token_scores(LmHead(weight, None, None, 1.0, size_mib * MIB), hidden, targets)
    scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started, _status("VmHWM") - before


def head_peak(shape: tuple[int, int, int]) -> float:
    """Return the peak bytes of the chunked layer as on a GPU, where a chunk is as large as the setting allows."""
    hidden, weight, targets = inputs(shape, "meta")
    with LiveBytes() as live:
        scores = token_scores(LmHead(weight, None, None, 1.0, DEFAULT * MIB), hidden, targets)
        scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return float(live.peak - hidden.nbytes - weight.nbytes)


def naive_peak(shape: tuple[int, int, int]) -> float:
    """Return the peak bytes of log_softmax of all logits at once."""
    hidden, weight, targets = inputs(shape, "meta")
    with LiveBytes() as live:
        logprobs = torch.nn.functional.linear(hidden, weight).log_softmax(-1).gather(1, targets[:, None])
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return float(live.peak - hidden.nbytes - weight.nbytes)


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
