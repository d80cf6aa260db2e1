"""As scripts for TRL write a `rollout_func`: they render, generate, play, and return token ids.

For TRL, the two imports of `slipstream.trl` are the only lines that differ.
"""

import json
import os
import random

from datasets import Dataset

from slipstream.trl import GRPOConfig, GRPOTrainer
from slipstream.trl.experimental.openenv import generate_rollout_completions


def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


def product_of(text):
    """The result of the call in an answer; None where it has none that can be read."""
    try:
        call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
        return multiply(**call["arguments"])
    except (ValueError, KeyError, TypeError):
        return None


def play(prompts, trainer):
    tokenizer = trainer.processing_class
    made = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "called": []}
    for prompt in prompts:
        prompt_ids = tokenizer.apply_chat_template(
            prompt, tools=[multiply], add_generation_prompt=True, return_dict=False
        )
        first = generate_rollout_completions(trainer, [prompt_ids])[0]
        ids, logprobs, mask = [*first["completion_ids"]], [*first["logprobs"]], [1] * len(first["completion_ids"])
        product = product_of(tokenizer.decode(first["completion_ids"]))  # its text is without special tokens
        if product is not None:
            answer = f"\n<|im_start|>user\n<tool_response>{product}</tool_response><|im_end|>\n<|im_start|>assistant\n"
            said = tokenizer.encode(answer, add_special_tokens=False)
            last = generate_rollout_completions(trainer, [[*prompt_ids, *ids, *said]])[0]
            ids += [*said, *last["completion_ids"]]
            logprobs += [*[0.0] * len(said), *last["logprobs"]]
            mask += [*[0] * len(said), *[1] * len(last["completion_ids"])]
        made["prompt_ids"].append(prompt_ids)
        made["completion_ids"].append(ids)
        made["logprobs"].append(logprobs)
        made["env_mask"].append(mask)
        made["called"].append(product is not None)
    return made


def correct(completions, called, answer, **kwargs):
    return [
        0.1 * has_called + float(completion[-1]["content"].rstrip().endswith(f"\n{right}"))
        for completion, has_called, right in zip(completions, called, answer, strict=True)
    ]


numbers = random.Random(1)
pairs = [(numbers.randint(0, 999), numbers.randint(0, 999)) for _ in range(512)]
dataset = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Multiply {a} by {b}."}], "answer": a * b} for a, b in pairs]
)

trainer = GRPOTrainer(
    model=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"),
    args=GRPOConfig(
        output_dir=os.environ.get("OUTPUT_DIR", "runs/trl-rollout-function"),
        learning_rate=4e-4,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=160,
        max_steps=int(os.environ.get("MAX_STEPS", "5")),
        use_vllm=True,
    ),
    train_dataset=dataset,
    reward_funcs=correct,
    rollout_func=play,
)

if __name__ == "__main__":
    trainer.train()
