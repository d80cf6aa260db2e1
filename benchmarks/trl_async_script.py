"""TRL's side of `benchmarks.trl_async`: one training with TRL's own AsyncGRPOTrainer, on a CPU."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import datasets
import task as example
import torch
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from benchmarks import trl_on_cpu, waiting_tasks


def accuracy(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """As the example's; TRL's last message of an episode that was cut off may have no text."""
    return [
        float(completion[-1].get("content") == str(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


async def judge(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """Wait as `waiting_tasks.judge` does."""
    await waiting_tasks.asyncio.sleep(waiting_tasks.JUDGE_S)
    return accuracy(completions, answer)


WAYS = {
    "as it stands": ([example.multiply], accuracy),
    "judge": ([example.multiply], judge),
    "tail": ([waiting_tasks.multiply], accuracy),
}


class Times(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--way", "--server"):
        parser.add_argument(name, required=True)
    for name in ("--model", "--out", "--work"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--seed", "--steps", "--first"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--inflight", "--queue"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    trl_on_cpu.use_stand_ins()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.response_template = qwen3_template
    tools, reward = WAYS[given.way]
    args = AsyncGRPOConfig(
        output_dir=str(given.work / "out"),
        max_steps=given.steps,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=4,
        token_budget=0,  # 4 times 32 rollouts are a step
        num_generations=8,
        learning_rate=4e-4,
        warmup_steps=10,
        max_completion_length=64,
        max_tool_calling_iterations=3,
        max_staleness=4,
        weight_sync_steps=1,
        vllm_server_base_url=given.server,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=given.seed,
        disable_tqdm=True,
        **({} if given.inflight is None else {"max_inflight_tasks": given.inflight, "queue_maxsize": given.queue}),
    )
    times = Times()
    trainer = AsyncGRPOTrainer(
        model=str(given.model),
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.Dataset.from_list(example.rows(4096, seed=1 + given.seed)),
        processing_class=tokenizer,
        callbacks=[times],
        tools=tools,
        weight_transfer=trl_on_cpu.FileTransfer(given.server, torch.float32),
    )
    trainer.train()
    seconds = [after - before for before, after in zip(times.ends, times.ends[1:], strict=False)][given.first - 1 :]
    lines = [line for line in trainer.state.log_history if "reward" in line]
    of = lambda name: [line[name] for line in lines if name in line]  # noqa: E731
    dropped = sum(of("sample/dropped_stale_total"))
    figures = {
        "step_s": statistics.mean(seconds),
        "step_s_median": statistics.median(seconds),
        "staleness_mean": statistics.mean(of("sample/staleness_mean")),
        "staleness_max": max(of("sample/staleness_max")),
        "dropped_share": dropped / (dropped + 128 * given.steps),
        "wait_share": sum(of("perf/rollout_wait_s")[given.first :]) / sum(seconds),
        "reward_last": statistics.mean(of("reward")[-5:]),
    }
    given.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
