"""TRL's side of `benchmarks.trl_async`: one training with TRL's own AsyncGRPOTrainer, on a CPU."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import requests
import safetensors.torch
import task as example
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

from benchmarks import waiting_tasks

# The mask of the row that was packed last, which all layers share.
_mask: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


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


def tree_mask(kv_index: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    """Return which positions of a packed row each position sees: those of its path, up to itself."""
    global _mask
    if _mask[0] is not kv_index:
        starts, ends = cu_q.tolist(), cu_k.tolist()
        seen = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
        for at in range(len(starts) - 1):
            seen[starts[at] : starts[at + 1], kv_index[ends[at] : ends[at + 1]]] = True
        _mask = kv_index, seen.tril()  # pre-order: a later position of a path stands later in the row
    found = _mask[1]
    assert found is not None
    return found


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """TRL's `tree_attention` by torch's kernel for CPUs."""
    seen = tree_mask(given["tree_kv_index"], given["tree_cu_seqlens_q"], given["tree_cu_seqlens_k"])
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=given.get("scaling"), enable_gqa=True
    )
    return out.transpose(1, 2), None


class FileTransfer:
    """TRL's `WeightTransferProtocol` by a file in memory."""

    def __init__(self, url: str, folder: Path) -> None:
        self._client = VLLMClient(url)
        self._folder = folder

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()

    def pause(self) -> None:
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        safetensors.torch.save_file(
            {name: tensor.contiguous() for name, tensor in iterator}, self._folder / "model.safetensors"
        )
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        requests.post(f"{self._client.server_url}/collective_rpc", json=body, timeout=120).raise_for_status()

    def resume(self) -> None:
        self._client.resume()

    def destroy(self) -> None:
        pass


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
    AttentionInterface.register(packing.TREE_ATTENTION, attention)
    AttentionMaskInterface.register(packing.TREE_ATTENTION, lambda **_: None)
    async_grpo_trainer.register_tree_attention = lambda: None
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
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
    folder = Path("/dev/shm") / f"trl-async-{given.server.rpartition(':')[2]}"
    folder.mkdir(exist_ok=True)
    times = Times()
    trainer = AsyncGRPOTrainer(
        model=str(given.model),
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.Dataset.from_list(example.rows(4096, seed=1 + given.seed)),
        processing_class=tokenizer,
        callbacks=[times],
        tools=tools,
        weight_transfer=FileTransfer(given.server, folder),
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
