"""As TRL's documentation writes a script with an adapter, and with a tool.

For TRL, `from trl import GRPOConfig, GRPOTrainer` is the only line that differs.
"""

import os
import random

from datasets import Dataset
from peft import LoraConfig

from slipstream.trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


def correct(completions, answer, **kwargs):
    return [
        float(completion[-1]["content"] == str(right)) for completion, right in zip(completions, answer, strict=True)
    ]


def main():
    numbers = random.Random(1)
    pairs = [(numbers.randint(0, 999), numbers.randint(0, 999)) for _ in range(512)]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"Multiply {a} by {b}."}], "answer": a * b} for a, b in pairs]
    )
    trainer = GRPOTrainer(
        model=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"),
        reward_funcs=correct,
        args=GRPOConfig(
            output_dir=os.environ.get("OUTPUT_DIR", "runs/trl-lora"),
            learning_rate=4e-3,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=160,
            max_steps=int(os.environ.get("MAX_STEPS", "5")),
            use_vllm=True,
        ),
        train_dataset=dataset,
        tools=[multiply],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
