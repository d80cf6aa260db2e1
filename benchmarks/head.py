"""Memory and time of the output layer, at the vocabulary of Qwen3: ours against all logits at once.

    python -m benchmarks.head [--tokens 8192]

Prints one JSON object: `head_peak_ratio` and `head_time_ratio`, ours over all logits at once. Each is measured in a
process of its own, memory as the growth of its greatest resident size. All logits at once are measured on fewer
tokens, as they would need 15 GB: their memory and time are proportional to the tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from learner.model.logprobs import LmHead, token_scores
from protocol.config import LearnerSection

VOCABULARY = 151_936
HIDDEN = 64
NAIVE_TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--way", choices=WAYS, help="measure this one, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(_measure(arguments.way, arguments.tokens)))
        return
    ours, naive = _measured("ours", arguments.tokens), _measured("naive", NAIVE_TOKENS)
    scale = arguments.tokens / NAIVE_TOKENS
    print(
        json.dumps(
            {
                "head_peak_ratio": round(ours["peak_mib"] / (naive["peak_mib"] * scale), 4),
                "head_time_ratio": round(ours["cpu_s"] / (naive["cpu_s"] * scale), 3),
                "head_peak_mib": round(ours["peak_mib"]),
                "head_cpu_s": round(ours["cpu_s"], 2),
                "head_tokens": arguments.tokens,
                "head_vocabulary": VOCABULARY,
            }
        )
    )


def _measured(way: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.head", "--way", way, "--tokens", str(tokens)]
    measured: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return measured


def _measure(way: str, tokens: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(VOCABULARY, HIDDEN)).requires_grad_()
    hidden = torch.randn(tokens, HIDDEN).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,))
    run = WAYS[way]
    run(hidden[:8], weight, targets[:8])  # threads and buffers of the libraries
    weight.grad = hidden.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = _resident_mib("VmRSS"), time.process_time()
    run(hidden, weight, targets)
    cpu_s = time.process_time() - began
    return {"peak_mib": _resident_mib("VmHWM") - before, "cpu_s": cpu_s}


def _ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    head = LmHead(weight, None, None, 1.0, LearnerSection().logprob_chunk_tokens)
    token_scores(head, hidden, targets).logprobs.sum().backward()  # type: ignore[no-untyped-call]


def _naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    logprobs = torch.log_softmax(hidden @ weight.T, -1)
    logprobs.gather(1, targets[:, None]).sum().backward()  # type: ignore[no-untyped-call]


WAYS = {"ours": _ours, "naive": _naive}


def _resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
