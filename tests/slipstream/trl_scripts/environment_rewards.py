"""As TRL's documentation writes a script with an environment whose state the reward reads.

For TRL, `from trl import GRPOConfig, GRPOTrainer` is the only line that differs.
"""

import os
import random

from datasets import Dataset

from slipstream.trl import GRPOConfig, GRPOTrainer


class Calculator:
    def reset(self, a, b, **kwargs) -> str:
        self.product = a * b
        self.asked = 0
        return f"Multiply {a} by {b}."

    def multiply(self, a: int, b: int) -> int:
        """
        Multiply two integers.

        Args:
            a: First factor.
            b: Second factor.
        """
        self.asked += 1
        return a * b


def correct(completions, environments, **kwargs):
    return [
        float(completion[-1]["content"] == str(environment.product)) - 0.1 * max(0, environment.asked - 1)
        for completion, environment in zip(completions, environments, strict=True)
    ]


numbers = random.Random(1)
dataset = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": ""}], "a": numbers.randint(0, 999), "b": numbers.randint(0, 999)}
        for _ in range(512)
    ]
)

trainer = GRPOTrainer(
    model=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"),
    args=GRPOConfig(
        output_dir=os.environ.get("OUTPUT_DIR", "runs/trl-environment-rewards"),
        learning_rate=4e-4,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=160,
        max_steps=int(os.environ.get("MAX_STEPS", "5")),
        use_vllm=True,
    ),
    train_dataset=dataset,
    reward_funcs=correct,
    environment_factory=Calculator,
)

if __name__ == "__main__":
    trainer.train()
