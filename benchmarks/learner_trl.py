"""Runs TRL 1.16.0's asynchronous GRPO learner on the batches of `benchmarks.learner`.

TRL's planner, trie rows, collator, chunked head and loss run unchanged. Four things differ from TRL:

- The trainer's constructor does not run, because it needs a GPU, servers and workers. The loop of transformers around
  the steps does not run either.
- The loss is divided by the step's tokens, not by those of each micro-batch. Only then can it equal ours.
- The head scores only the tokens that train, as on a GPU. On a CPU it would score every token, and take longer.
- Padded SDPA over buckets of segments of similar length replaces FlashAttention-3, which is for Hopper GPUs. The result
  is exact.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.learner_cases import Batch, Size
from benchmarks.learner_ways import SECTION, advantages_of
from slipstream.learner.training import optimiser

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.async_grpo import async_grpo_trainer, packing
    from trl.trainer import utils

# Minimum length of a bucket's shortest segment as a share of its longest, as in our attention.
MIN_SHARE = 0.8


class Trl:
    """Makes a step with TRL's `TokenBudgetBatcher`, `DataCollatorForRollout` and `AsyncGRPOTrainer.compute_loss`."""

    name = "trl"

    def __init__(self, size: Size, batch: Batch, budget: int, device: torch.device) -> None:
        packing.register_tree_attention()
        self.model = size.build(packing.TREE_ATTENTION, device)
        utils.add_fused_lm_head(self.model, temperature=1.0, outputs=("log_probs", "entropy"))
        self.optimiser = optimiser.build_optimiser(self.model, SECTION).stepper
        self.forwarded = 0
        self._accelerator = Accelerator()
        self._budget, self._device = budget, device
        advantages, self._tokens = advantages_of(batch)
        self._samples = [
            {
                "input_ids": sample.token_ids,
                "completion_mask": sample.weights.astype("int64"),
                "old_log_probs": sample.behaviour,
                "advantage": advantages[sample.rollout],
                "group_id": sample.group,
                "metrics": {},
            }
            for sample in batch.samples
        ]

    def step(self) -> float:
        with (
            patch.object(packing, "_flash_attn", lambda: _StandIn),
            patch.object(utils, "_use_triton", lambda device: True),
        ):
            return self._step()

    def _step(self) -> float:
        trainer = self._trainer()
        planner = async_grpo_trainer.TokenBudgetBatcher(self._samples, 1, self._budget, defaultdict(list))
        collator = async_grpo_trainer.DataCollatorForRollout(0, 1, token_budget=self._budget)
        loss = torch.zeros((), device=self._device)
        self.forwarded = 0
        rows = list(planner)
        # The planner leaves the last row open: its stream of samples never ends.
        rows += _unplanned(self._samples, rows)
        for planned in rows:
            inputs = {name: value.to(self._device) for name, value in collator([planned]).items()}
            self.forwarded += inputs["input_ids"].numel()
            inputs["global_n_tokens"] = torch.full((1,), float(self._tokens))
            part = async_grpo_trainer.AsyncGRPOTrainer.compute_loss(trainer, self.model, inputs)
            self._accelerator.backward(part)
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), SECTION.max_grad_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss)

    def _trainer(self) -> SimpleNamespace:
        """Return an object with the attributes that `compute_loss` reads of its trainer."""
        return SimpleNamespace(
            accelerator=self._accelerator,
            epsilon_low=SECTION.clip_low,
            epsilon_high=SECTION.clip_high,
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list)},
            _step_forward_tokens=0.0,
            _step_trained_tokens=0.0,
            _step_seq_len_weighted=0.0,
            _step_samples=0.0,
            _step_forward_s=0.0,
        )


def _unplanned(samples: list[dict[str, Any]], rows: list[Any]) -> list[Any]:
    planned = sum(len(row.samples) for of_ranks in rows for row in of_ranks)
    row = packing.TreeRow()
    for sample in samples[planned:]:
        row.add(sample)
    return [[row]] if row.samples else []


@dataclass(frozen=True)
class _Segments:
    """Holds segments of similar lengths, padded on the left to `queries` and `keys`, so that their last tokens align.

    Attributes:
        q: int64 [t], positions of the queries.
        q_slots: int64 [t], their slots in the padded batch.
        k: int64 [s], positions of the gathered keys.
        k_slots: int64 [s], their slots in the padded batch.
        count: Number of segments.
        queries: Padded number of queries, tokens.
        keys: Padded number of keys, tokens.
        mask: bool [count, 1, queries, keys]. None if the segments are whole paths, which are padded on the right.
    """

    q: torch.Tensor
    q_slots: torch.Tensor
    k: torch.Tensor
    k_slots: torch.Tensor
    count: int
    queries: int
    keys: int
    mask: torch.Tensor | None


class _StandIn:
    """Replaces FlashAttention-3: its `flash_attn_varlen_func`, causal, with queries aligned to the last keys."""

    _layouts: tuple[torch.Tensor, list[_Segments]] | None = None

    @classmethod
    def flash_attn_varlen_func(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: Any,
        starts_k: Any,
        *_: Any,
        **of: Any,
    ) -> torch.Tensor:
        assert of["causal"]
        assert of["window_size"] == (-1, -1)
        if cls._layouts is None or cls._layouts[0] is not starts_q:  # A row needs one layout.
            cls._layouts = (starts_q, _layout(starts_q.tolist(), starts_k.tolist(), query.device))
        out = torch.empty_like(query)
        for segments in cls._layouts[1]:
            q = _padded(query[segments.q], segments.q_slots, segments.count, segments.queries)
            k, v = (_padded(t[segments.k], segments.k_slots, segments.count, segments.keys) for t in (key, value))
            part = scaled_dot_product_attention(
                *(q, k, v, segments.mask),
                is_causal=segments.mask is None,
                scale=of["softmax_scale"],
                enable_gqa=query.shape[1] != key.shape[1],
            )
            out = out.index_copy(0, segments.q, part.transpose(1, 2).flatten(0, 1)[segments.q_slots])
        return out


def _padded(tokens: torch.Tensor, slots: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Pad tokens: [t, H, D] -> [count, H, length, D]."""
    empty = tokens.new_zeros(count * length, *tokens.shape[1:])
    return empty.index_copy(0, slots, tokens).view(count, length, *tokens.shape[1:]).transpose(1, 2)


def _layout(starts_q: list[int], starts_k: list[int], device: torch.device) -> list[_Segments]:
    lengths = [
        (q_end - q, k_end - k)
        for q, q_end, k, k_end in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
    ]
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i][0] == lengths[i][1], *lengths[i]), reverse=True)
    found: list[list[int]] = []
    for i in order:
        if not found or not _alike(lengths[found[-1][0]], lengths[i]):
            found.append([])
        found[-1].append(i)
    return [_segments(members, lengths, starts_q, starts_k, device) for members in found]


def _alike(first: tuple[int, int], other: tuple[int, int]) -> bool:
    whole = (first[0] == first[1]) == (other[0] == other[1])
    return whole and all(MIN_SHARE * a <= b <= a for a, b in zip(first, other, strict=True))


def _segments(
    members: list[int], lengths: list[tuple[int, int]], starts_q: list[int], starts_k: list[int], device: torch.device
) -> _Segments:
    queries, keys = (max(lengths[i][of] for i in members) for of in (0, 1))
    whole = all(lengths[i][0] == lengths[i][1] for i in members)
    q, q_slots, k, k_slots, masks = [], [], [], [], []
    for place, i in enumerate(members):
        own, path = lengths[i]
        q.append(torch.arange(starts_q[i], starts_q[i] + own))
        k.append(torch.arange(starts_k[i], starts_k[i] + path))
        q_slots.append(torch.arange(own) + place * queries + (0 if whole else queries - own))
        k_slots.append(torch.arange(path) + place * keys + (0 if whole else keys - path))
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        seen[:, : keys - path] = False
        seen[: queries - own] = True  # Padding is never read, but a row without a key would be NaN.
        masks.append(seen)
    mask = None if whole else torch.stack(masks)[:, None].to(device)
    return _Segments(
        *(_whole(q, device), _whole(q_slots, device), _whole(k, device), _whole(k_slots, device)),
        *(len(members), queries, keys, mask),
    )


def _whole(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(parts).to(device)
