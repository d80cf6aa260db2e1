"""As TRL's documentation writes a script for its asynchronous trainer: async and sync tools and rewards,
`train()` under the main guard.

For TRL, `from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer` is the only line that differs.
"""

import asyncio
import os
import random

from datasets import Dataset

from slipstream.trl import AsyncGRPOConfig, AsyncGRPOTrainer


async def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    await asyncio.sleep(0.05)
    return a * b


def add(a: int, b: int) -> int:
    """
    Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b


def correct(completions, answer, trainer_state=None, **kwargs):
    bonus = 0.0 if trainer_state is None or trainer_state.global_step else 0.01
    return [
        bonus + float(completion[-1]["content"] == str(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


async def brief(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 / (1 + len(completion[-1]["content"])) for completion in completions]


numbers = random.Random(1)
pairs = [(numbers.randint(0, 999), numbers.randint(0, 999)) for _ in range(512)]
dataset = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Multiply {a} by {b}."}], "answer": a * b} for a, b in pairs]
)

trainer = AsyncGRPOTrainer(
    model=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"),
    reward_funcs=[correct, brief],
    args=AsyncGRPOConfig(
        output_dir=os.environ.get("OUTPUT_DIR", "runs/trl-async"),
        learning_rate=4e-4,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=160,
        max_tool_calling_iterations=3,
        max_staleness=2,
        weight_sync_steps=1,
        max_steps=int(os.environ.get("MAX_STEPS", "5")),
    ),
    train_dataset=dataset,
    tools=[multiply, add],
)

if __name__ == "__main__":
    trainer.train()
    trainer.save_model()
