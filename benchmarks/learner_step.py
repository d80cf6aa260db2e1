"""Speed and memory of one optimiser step on a tiny Qwen3: 128 two-turn episodes of about 170 tokens.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.learner_step [--steps 5] [--token-budget 8192]

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import numpy as np
import torch

from learner.feed.packing import Sample, pack
from learner.model import attention
from learner.model.policy import Policy, Scoring
from learner.trainer import Trainer
from protocol.config import LearnerSection
from tests.kit.learner import step_rollouts
from tests.kit.model import tiny_model

EPISODES = 128
VOCABULARY = 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--token-budget", type=int, default=LearnerSection().token_budget)
    arguments = parser.parse_args()

    trainer = Trainer(tiny_policy(), LearnerSection(learning_rate=4e-4), longest=160)
    samples = episodes(np.random.default_rng(0))
    rollouts = step_rollouts(samples, group_size=8)
    tokens = int(rollouts.tokens.sum())

    seconds, cpu_seconds = [], []
    for _ in range(arguments.steps + 1):
        started, cpu = time.perf_counter(), time.process_time()
        rows = pack(samples, arguments.token_budget)
        trainer.step(rows, rollouts)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu)
    step_s = statistics.median(seconds[1:])  # the first one warms up
    row_tokens = sum(row.tokens for row in rows)
    print(
        json.dumps(
            {
                "step_s": round(step_s, 4),
                "step_s_min": round(min(seconds[1:]), 4),
                "step_cpu_s": round(statistics.median(cpu_seconds[1:]), 4),
                "train_tokens_per_s": round(tokens / step_s),
                "packed_tokens_per_s": round(row_tokens / step_s),
                "episodes": EPISODES,
                "tokens_packed": row_tokens,
                "tokens_trained": tokens,
                "rows": len(rows),
                "token_budget": arguments.token_budget,
                "threads": torch.get_num_threads(),
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


def tiny_policy() -> Policy:
    """The model of examples/multiply: 394 k parameters."""
    model = tiny_model(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        head_dim=32,
        initializer_range=0.02,
        attn_implementation=attention.NAME,
    )
    return Policy(model, attention.NAME, Scoring(temperature=1.0, logits_mib=512))


def episodes(random: np.random.Generator) -> list[Sample]:
    """System, tools and user; a sampled call; the tool's result; a sampled answer."""
    samples = []
    for number in range(EPISODES):
        parts = [random.integers(99, 106), random.integers(27, 34), random.integers(17, 22), random.integers(9, 16)]
        sampled = np.repeat([False, True, False, True], parts)
        token_ids = random.integers(0, VOCABULARY, len(sampled)).astype(np.int32)
        behaviour = np.where(sampled, -6.0, 0.0).astype(np.float32)
        samples.append(
            Sample(
                token_ids,
                behaviour,
                weights=sampled.astype(np.float32),
                staleness=np.zeros(len(sampled), dtype=np.int32),
                rollout=number,
                group=number // 8,
            )
        )
    return samples


if __name__ == "__main__":
    main()
