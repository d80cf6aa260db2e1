"""Memory and time of the output layer, at the vocabulary of Qwen3: ours against all logits at once.

Each is measured in a process of its own, as the growth of its peak resident memory over what it held before. All logits
at once are measured on fewer tokens, as they would need 15 GB: their memory and time are proportional to the tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from learner.model.logprobs import LmHead, token_scores
from protocol.config import LearnerSection

VOCABULARY = 151_936
HIDDEN = 64
TOKENS = 8192
NAIVE_TOKENS = 1024


def figures(tokens: int = TOKENS, naive_tokens: int = NAIVE_TOKENS) -> dict[str, Any]:
    """`head_peak_ratio` and `head_time_ratio`: ours over all logits at once, of the same number of tokens."""
    ours, naive = _measured("ours", tokens), _measured("naive", naive_tokens)
    scale = tokens / naive_tokens
    return {
        "head_peak_ratio": round(ours["peak_mib"] / (naive["peak_mib"] * scale), 4),
        "head_time_ratio": round(ours["cpu_s"] / (naive["cpu_s"] * scale), 3),
        "head_peak_mib": round(ours["peak_mib"]),
        "head_cpu_s": round(ours["cpu_s"], 2),
        "head_tokens": tokens,
        "head_vocabulary": VOCABULARY,
    }


def _measured(way: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.learner_head", way, str(tokens)]
    measured: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["ours", "naive"])
    parser.add_argument("tokens", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(VOCABULARY, HIDDEN)).requires_grad_()
    hidden = torch.randn(arguments.tokens, HIDDEN).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (arguments.tokens,))
    run = _ours if arguments.way == "ours" else _naive
    run(hidden[:8], weight, targets[:8])  # threads and buffers of the libraries
    weight.grad = hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = _resident_mib("VmRSS"), time.process_time()
    run(hidden, weight, targets)
    cpu_s = time.process_time() - began
    print(json.dumps({"peak_mib": _resident_mib("VmHWM") - before, "cpu_s": cpu_s}))


def _ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    head = LmHead(weight, None, None, 1.0, LearnerSection().logprob_chunk_tokens)
    token_scores(head, hidden, targets).logprobs.sum().backward()


def _naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    logprobs = torch.log_softmax(hidden @ weight.T, -1)
    logprobs.gather(1, targets[:, None]).sum().backward()


def _resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
