"""Sections of `benchmarks.gpu_day` about speed, in seconds of a step after one that warms up. See `gpu_correctness`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.gpu_correctness import device
from benchmarks.learner import compare
from benchmarks.learner_cases import CASES, SIZES, Shape, batch
from slipstream.deploy.servers import gpu_memory
from slipstream.deploy.servers.model_shape import ModelShape
from slipstream.learner.feed import packing
from slipstream.learner.feed.packing import PackedRow, pack
from slipstream.learner.model import loading
from slipstream.learner.model.logprobs import LmHead, token_scores
from slipstream.learner.model.policy import Policy, Scoring
from slipstream.learner.model.precision import Precision
from slipstream.learner.ranks import wrapping
from slipstream.learner.training.flops import Work, peak
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection, RunConfig

# As published for Qwen3-0.6B, Qwen2.5-1.5B and Qwen3-4B.
SHAPES = {
    "tiny": ModelShape(2, 64, 128, 4, 2, 16, 512, tied=True),
    "0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "1.5B": ModelShape(28, 1536, 8960, 12, 2, 128, 151936, tied=True),
    "4B": ModelShape(36, 2560, 9728, 32, 8, 128, 151936, tied=True),
}

# Float32 weights, bfloat16 products.
MIXED = Precision(torch.float32, torch.bfloat16, torch.bfloat16)

LOGITS_MIB = LearnerSection().logits_mib

STEPS = 2


def build_network(shape: ModelShape, here: torch.device, kind: torch.dtype = torch.float32) -> Any:
    """Make a random model on the device."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=65536,
        attn_implementation=packing.PACKED_ATTENTION,
    )
    torch.manual_seed(0)
    with torch.device(here):
        return Qwen3ForCausalLM(config).to(kind)


def build_policy(shape: ModelShape, here: torch.device) -> Policy:
    """Make a policy of random weights, float32 with products in bfloat16."""
    return Policy(build_network(shape, here), packing.PACKED_ATTENTION, Scoring(1.0, LOGITS_MIB), MIXED)


def rows_of(shape: ModelShape, tokens: int, small: bool) -> list[PackedRow]:
    """Pack 4 groups of 8 rollouts, of a common prompt of 512 tokens and 1,536 sampled ones each, into rows."""
    return pack(_batch(shape, small).samples, tokens)


def _batch(shape: ModelShape, small: bool) -> Any:
    lengths = Shape(2, 16, lambda count: [24] * count) if small else Shape(4, 512, lambda count: [1536] * count)
    return batch(lengths, shape.vocabulary)


def learner(small: bool) -> dict[str, Any]:
    """Measure a step next to a padded loop, and TRL where it is installed."""
    size = SIZES["0.4M" if small else "0.6B"]
    figures = {}
    for case in ("short", "mixed"):
        found = compare(
            CASES[case].smaller(8 if small else 1), size, 4096 if small else 8192, 1 if small else 3, device()
        )
        wanted = ("seconds", "trl_ratio", "padded_ratio", "peak_mib")
        figures[case] = {name: found[name] for name in wanted if found.get(name) is not None}
    return figures


def masters(small: bool) -> dict[str, Any]:
    """Measure steps of float32 weights, by size of the row, checkpointing and compilation."""
    figures: dict[str, Any] = {}
    for name in ("tiny",) if small else ("1.5B", "4B"):
        for tokens in (128,) if small else (8192, 16384, 32768):
            for checkpointing in (False, True):
                found = _measured(SHAPES[name], tokens, checkpointing, False, small)
                figures[f"{name}, rows of {tokens}{', checkpointing' if checkpointing else ''}"] = found
        if not small:
            figures[f"{name}, rows of 8192, compiled"] = _measured(SHAPES[name], 8192, False, True, small)
    return figures


def _measured(shape: ModelShape, tokens: int, checkpointing: bool, compiled: bool, small: bool) -> dict[str, Any]:
    """Measure steps, and the peak next to what the plan counts for it; a row that does not fit has no figures."""
    here = device()
    try:
        return _steps(shape, tokens, checkpointing, compiled, small, here)
    except torch.OutOfMemoryError as error:
        return {"out of memory": str(error)[:120]}
    finally:
        if here.type == "cuda":
            torch.cuda.empty_cache()


def _steps(
    shape: ModelShape, tokens: int, checkpointing: bool, compiled: bool, small: bool, here: torch.device
) -> dict[str, Any]:
    policy = build_policy(shape, here)
    if compiled:
        loading.compile_layers(policy.model)
    if checkpointing:
        loading.checkpoint_layers(policy.model)
    given = _batch(shape, small)
    trainer, rows = PolicyTrainer(policy, LearnerSection(), longest=2048), pack(given.samples, tokens)
    trainer.step(rows, given.rollouts)
    if here.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = _timed(lambda: trainer.step(rows, given.rollouts), here, STEPS)
    forwarded = sum(row.tokens for row in rows)
    figures: dict[str, Any] = {"s a step": seconds, "tokens/s": forwarded / seconds}
    if here.type == "cuda":
        run = RunConfig.model_validate({"model": {"path": "m", "dtype": "bfloat16"}, "task": {"path": "task.py:task"}})
        longest = max(row.tokens for row in rows)
        planned = gpu_memory.learner_bytes(shape, run, longest, checkpointing)
        alone = replace(planned, published=0, staging=0, runtime=0)
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        figures["planned GiB"] = alone.total / 2**30
        if device_peak := peak(here, torch.bfloat16):
            figures["mfu"] = Work.of(policy).of_rows(rows) / seconds / device_peak
    return figures


def head(small: bool) -> dict[str, Any]:
    """Measure the output layer, forward and backward, by `learner.logits_mib`."""
    here = device()
    kind = torch.bfloat16 if here.type == "cuda" else torch.float32
    tokens, words, hidden = (64, 1000, 32) if small else (8192, 151936, 2560)
    inputs = torch.randn(tokens, hidden, device=here, dtype=kind, requires_grad=True)
    weight = (torch.randn(words, hidden, device=here, dtype=kind) * hidden**-0.5).requires_grad_()
    targets = torch.randint(words, (tokens,), device=here)
    figures = {}
    for mib in (64, LOGITS_MIB, 2048):
        layer = LmHead(weight, None, None, 1.0, mib << 20)

        def both(layer: LmHead = layer) -> None:
            token_scores(layer, inputs, targets).logprobs.sum().backward()  # type: ignore[no-untyped-call]

        both()
        figures[f"{mib} MiB"] = _timed(both, here, STEPS)
    return {"s": figures}


def sharded(small: bool) -> dict[str, Any]:
    """Measure a row under `fully_shard` on one rank: as the learner calls it, and with its own mixed precision."""
    here, shape = device(), SHAPES["tiny" if small else "1.5B"]
    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    figures: dict[str, Any] = {}
    with _one_rank(here):
        for name in ("learner", "mixed precision"):
            policy = build_policy(shape, here)
            if name == "learner":
                wrapping.sharded(policy, here)
            else:
                for module in list(policy.modules()):
                    if isinstance(module, GradientCheckpointingLayer):
                        fully_shard(module, mp_policy=own)
                fully_shard(policy, mp_policy=own)
            row = rows_of(shape, 4096, small)[0].to(here)

            def both(policy: Policy = policy, row: PackedRow = row) -> None:
                policy(row).logprobs.sum().backward()

            both()
            if here.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            figures[name] = {"s a row": _timed(both, here, STEPS)}
            if here.type == "cuda":
                figures[name]["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


@contextmanager
def _one_rank(here: torch.device) -> Iterator[None]:
    dist: Any = torch.distributed
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder, 'store')}"
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo", init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def profile(small: bool) -> dict[str, Any]:
    """Measure which share of a step kernels run; on a CPU, only how many operators do."""
    here, shape = device(), SHAPES["tiny" if small else "0.6B"]
    given = _batch(shape, small)
    trainer, rows = PolicyTrainer(build_policy(shape, here), LearnerSection(), longest=2048), pack(given.samples, 8192)
    trainer.step(rows, given.rollouts)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if here.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiled:
        seconds = _timed(lambda: trainer.step(rows, given.rollouts), here, 1)
    events = profiled.events() or []
    if here.type != "cuda":
        return {"operators": len(events)}
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1e6
    return {"s a step": seconds, "kernels": len(kernels), "share in kernels": busy / seconds}


def _timed(work: Callable[[], Any], here: torch.device, times: int) -> float:
    """Return the mean seconds of `work`."""
    if here.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    if here.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times
