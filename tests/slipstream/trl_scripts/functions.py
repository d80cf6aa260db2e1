"""As TRL's documentation writes a script with tools: functions, a reward that logs, `train()` at the top level.

For TRL, `from trl import GRPOConfig, GRPOTrainer` is the only line that differs.
"""

import os
import random

from datasets import Dataset

from slipstream.trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


def accuracy_reward(completions, answer, log_extra=None, log_metric=None, **kwargs):
    contents = [completion[-1]["content"] for completion in completions]
    rewards = [float(content == str(right)) for content, right in zip(contents, answer, strict=True)]
    if log_extra:
        log_extra("answer", [str(right) for right in answer])
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


numbers = random.Random(1)
pairs = [(numbers.randint(0, 999), numbers.randint(0, 999)) for _ in range(512)]
dataset = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"Multiply {a} by {b}."}] for a, b in pairs],
        "answer": [a * b for a, b in pairs],
    }
)

training_args = GRPOConfig(
    output_dir=os.environ.get("OUTPUT_DIR", "runs/trl-functions"),
    learning_rate=4e-4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_completion_length=160,
    max_steps=int(os.environ.get("MAX_STEPS", "5")),
    warmup_steps=2,
    lr_scheduler_type="constant_with_warmup",
    logging_steps=1,
    use_vllm=True,
    vllm_mode="colocate",
    log_completions=True,
    report_to="none",
)

trainer = GRPOTrainer(
    model=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"),
    args=training_args,
    train_dataset=dataset,
    reward_funcs=accuracy_reward,
    tools=[multiply],
)
result = trainer.train()
print(f"trained {result.global_step} steps, loss {result.training_loss}")
