"""As TRL's documentation writes a script for RLOO.

For TRL, `from trl import RLOOConfig, RLOOTrainer` is the only line that differs.
"""

import os
import random

from datasets import Dataset

from slipstream.trl import RLOOConfig, RLOOTrainer


def near_twenty(completions, **kwargs):
    return [-abs(20 - len(completion[0]["content"])) / 20 for completion in completions]


numbers = random.Random(1)
dataset = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Multiply {numbers.randint(0, 999)} by 7."}]} for _ in range(512)]
)

training_args = RLOOConfig(
    output_dir=os.environ.get("OUTPUT_DIR", "runs/trl-rloo"),
    learning_rate=4e-4,
    beta=0.0,
    per_device_train_batch_size=64,
    num_generations=4,
    max_completion_length=64,
    max_steps=int(os.environ.get("MAX_STEPS", "5")),
)
trainer = RLOOTrainer(
    model=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"),
    reward_funcs=near_twenty,
    args=training_args,
    train_dataset=dataset,
)

if __name__ == "__main__":
    trainer.train()
