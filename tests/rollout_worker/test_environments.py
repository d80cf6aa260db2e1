"""Environments: one instance an episode, pooled, reset, asked for tools, answers and rewards, and always closed."""

import pytest

from tests.kit import WORKER, config
from tests.kit.fake_vllm.policies import scripted
from tests.kit.worker import TOKENIZER, fake, roll, row, task


class Counter:
    def __init__(self):
        self.count = 0

    def reset(self, a, **columns):
        self.count = 0
        return f" Begin at {a}."

    def add(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: How much.
        """
        self.count += step
        return self.count

    def get_reward(self):
        return float(self.count)


def adding(text, index):
    if "<tool_response>" in text:
        return "done"
    return '<tool_call>{"name": "add", "arguments": {"step": 3}}</tool_call>'


async def test_smoke():
    run = await roll(
        task(dataset=[row(a=5, b=1) | {"a": 5}], tools=[], rewards=(), environment=Counter),
        fake(scripted(TOKENIZER, adding)),
        tickets=3,
    )
    print(run.queue.failures, run.worker._troubles.found)
    for r in run.rollouts:
        print(r.reward, r.reward_components, r.metrics, r.timings, r.messages)
    assert 0
