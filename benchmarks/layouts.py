"""Measures an optimiser step in each layout of rows (`learner.layout`), and what a hybrid costs next to a dense model.

    python -m benchmarks.layouts [--cases short mixed long_prompt] [--rounds 5]

Each way makes the step of the same batch, in turn, on one core and one thread; on a GPU if there is one. The dense
model is that of 7M parameters of `benchmarks.learner`; the hybrid a Qwen3-Next of its width and depth, three of four
layers linear attention, here in transformers' own code unless flash-linear-attention is installed.

Prints one JSON line for each case: seconds of a step (CPU seconds on a CPU), tokens of the batch as sampled, tokens
that each layout runs through the model, tokens sampled a second as a ratio to padded, and on a GPU the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from benchmarks.learner import measure
from benchmarks.learner_cases import CASES, SIZES, Batch, batch
from benchmarks.learner_ways import SECTION
from slipstream.learner.attention import layouts
from slipstream.learner.feed.packing import PACKED_ATTENTION, pack
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.training.trainer import PolicyTrainer

DENSE = SIZES["7M"]


class Laid:
    """Makes a step with rows of one layout.

    Attributes:
        forwarded: Tokens of a step that run through the model, padding left out.
    """

    def __init__(self, model: Any, layout: layouts.Layout, step: Batch, budget: int) -> None:
        self.name = layout
        self.model = model
        policy = Policy(model, PACKED_ATTENTION, Scoring(1.0, SECTION.logits_mib))
        policy.use(layout)
        self._trainer = PolicyTrainer(policy, SECTION, longest=2048)
        self._batch, self._budget, self._branches = step, budget, layout == "trie"
        self.optimiser = self._trainer.optimiser.optimizer
        self.forwarded = 0

    def step(self) -> float:
        rows = pack(self._batch.samples, self._budget, branches=self._branches)
        self.forwarded = sum(row.tokens for row in rows)
        return self._trainer.step(rows, self._batch.rollouts).loss


def dense(device: torch.device) -> Any:
    return DENSE.build(PACKED_ATTENTION, device)


def hybrid(device: torch.device) -> Any:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **DENSE.config,
        num_experts=0,
        mlp_only_layers=list(range(DENSE.config["num_hidden_layers"])),
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        attn_implementation=PACKED_ATTENTION,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Qwen3NextForCausalLM(config).to(device, dtype).eval()


def compare(step: Batch, budget: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure all ways on a batch, and return the figures by name."""
    kinds: dict[str, tuple[Callable[[torch.device], Any], layouts.Layout]] = {
        **{layout: (dense, layout) for layout in ("trie", "packed", "padded")},
        "hybrid": (hybrid, "packed" if device.type == "cuda" else "padded"),
    }
    ways = [Laid(make(device), layout, step, budget) for make, layout in kinds.values()]
    measured = dict(zip(kinds, measure(ways, rounds, device), strict=True))
    seconds = {name: of.seconds for name, of in measured.items()}
    found: dict[str, Any] = {
        "seconds": {name: round(taken, 3) for name, taken in seconds.items()},
        "tokens_sampled": step.raw,
        "tokens_forwarded": {name: of.forwarded for name, of in measured.items()},
        "speed_beside_padded": {name: round(seconds["padded"] / taken, 2) for name, taken in seconds.items()},
        "loss_difference": max(abs(measured[name].loss - measured["trie"].loss) for name in ("packed", "padded")),
    }
    if device.type == "cuda":
        found["peak_mib"] = {name: round(of.peak_mib) for name, of in measured.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["short", "mixed", "long_prompt"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--token-budget", type=int, default=SECTION.token_budget)
    parser.add_argument("--smaller", type=int, default=DENSE.parts, help="part of a case that a step has")
    parser.add_argument("--core", type=int, default=0, help="the core that the process stays on")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {arguments.core})
    for case in arguments.cases:
        step = batch(CASES[case].smaller(arguments.smaller), DENSE.config["vocab_size"])
        print(json.dumps({"case": case, **compare(step, arguments.token_budget, arguments.rounds, device)}), flush=True)


if __name__ == "__main__":
    main()
