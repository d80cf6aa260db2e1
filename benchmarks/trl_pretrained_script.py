"""TRL's side of `benchmarks.trl_pretrained`: one training with TRL's own AsyncGRPOTrainer, on a CPU."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import datasets
import task as example
import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from benchmarks import trl_on_cpu
from benchmarks.saved_weights import Saved
from slipstream.protocol.config import load


def correct(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """As the example's; a message that TRL parses may have no text."""
    return example.correct([[{"content": each[-1].get("content") or ""}] for each in completions], answer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True, help="the run file, with every setting")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--micro", type=int, required=True, help="rollouts of a forward pass")
    parser.add_argument("--transfer", choices=["file", "slipstream"], default="file")
    for name in ("--inflight", "--queue"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    config = load(given.run)
    rollout, learner = config.rollout, config.learner
    rollouts = rollout.group_size * learner.groups_per_step
    trl_on_cpu.use_stand_ins()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.response_template = (
        qwen3_template  # TRL refuses a chat template that it does not know; this is ChatML too
    )
    args = AsyncGRPOConfig(
        output_dir=str(given.out.parent / "out"),
        max_steps=learner.steps,
        per_device_train_batch_size=given.micro,
        gradient_accumulation_steps=rollouts // given.micro,
        token_budget=0,
        num_generations=rollout.group_size,
        learning_rate=learner.learning_rate,
        lr_scheduler_type=learner.lr_scheduler_type,
        temperature=rollout.temperature,
        max_completion_length=rollout.max_turn_tokens,
        max_staleness=config.queue.max_staleness,
        weight_sync_steps=1,
        vllm_server_base_url=given.server,
        dtype="float32",
        bf16=config.model.dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=config.run.seed,
        disable_tqdm=True,
        **({} if given.inflight is None else {"max_inflight_tasks": given.inflight, "queue_maxsize": given.queue}),
    )
    if given.transfer == "file":
        transfer: Any = trl_on_cpu.FileTransfer(given.server, getattr(torch, config.model.dtype))
    else:
        transfer = trl_on_cpu.SlipstreamTransfer(given.server, str(config.model.path), config.model.dtype)
    trainer = AsyncGRPOTrainer(
        model=str(config.model.path),
        reward_funcs=correct,
        args=args,
        train_dataset=datasets.Dataset.from_list(example.questions[example.HELD_OUT :]).shuffle(config.run.seed),
        processing_class=tokenizer,
        callbacks=[Saved()],
        weight_transfer=transfer,
    )
    transfer.model = trainer.model
    trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    of = lambda name: [line[name] for line in lines if name in line]  # noqa: E731
    dropped = sum(of("sample/dropped_stale_total"))
    figures = {
        "tokens": sum(of("batch/trained_tokens_per_step")),
        "dropped_share": dropped / (dropped + rollouts * learner.steps),
        "wait_s": sum(of("perf/rollout_wait_s")),
        "staleness_mean": statistics.mean(of("sample/staleness_mean")),
        "sync_s": statistics.mean(of("perf/weight_sync_s")),
        "pause_s": statistics.mean(transfer.pauses),
        "proof_nats": max(transfer.differences, default=None),
        "reward_first": of("reward")[0],
        "reward_last": statistics.mean(of("reward")[-5:]),
    }
    given.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
