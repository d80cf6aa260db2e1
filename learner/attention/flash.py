"""Attention along the paths of a prefix trie on a GPU with torch's own FlashAttention: no mask, nothing computed twice.

One causal call goes over the trie's nodes, which stand end to end. Then there is one call without a mask for each level
of inner nodes, as the descendants of the nodes of one level are disjoint. Results are merged by log-sum-exp in float32,
as on a CPU (`learner.attention.cpu`). Run on an H200 (docs/measured_on_gpus.md); the tests have a stand-in that
computes what the two kernels document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.learner.attention.paths import sent

# torch.nn.attention.varlen calls these (arXiv:2307.08691). out [t, H, D], log-sums float32 [H, t].
_forward = torch.ops.aten._flash_attention_forward

_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class Level:
    """Nodes of one level and the descendants of each, end to end.

    Attributes:
        queries: int64 [t], tokens of the row.
        keys: int64 [s], tokens of the row.
        query_bounds: int32 [n + 1], where each node's queries begin, and the end.
        key_bounds: int32 [n + 1], likewise.
        longest_query: Tokens.
        longest_key: Tokens.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class FlashLayout:
    """The calls of a row, planned once and used by every layer.

    Attributes:
        bounds: int32 [n + 1], where nodes begin, and T.
        longest: Tokens of the longest node.
    """

    bounds: torch.Tensor
    longest: int
    levels: list[Level]


def flash_supports(query: torch.Tensor) -> bool:
    """Say whether torch's FlashAttention takes queries [T, H, D] like these, forward and backward."""
    width = query.shape[-1]
    if query.device.type != "cuda" or torch.version.hip or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if (
        torch.cuda.get_device_capability(query.device) < (8, 0)
        or not torch.backends.cuda.is_flash_attention_available()
    ):
        return False
    # Some GPUs have no backward for widths above 192 and up to 224 (torch's sdp_utils.cpp).
    return width % 8 == 0 and (width <= 192 or 224 < width <= 256)


def flash_layout(starts: Sequence[int], reach: Sequence[int], device: torch.device) -> FlashLayout:
    """Plan a row.

    Args:
        starts: n + 1 indices: where each of the n nodes begins, and where the last ends.
        reach: n indices: where the descendants of each node end.
    """
    levels: list[list[int]] = []
    around: list[int] = []  # ends of the inner nodes that the next node descends from
    for node, reached in enumerate(reach):
        while around and around[-1] <= starts[node]:
            around.pop()
        if reached > starts[node + 1]:
            levels.extend([[]] if len(around) == len(levels) else [])
            levels[len(around)].append(node)
            around.append(reached)
    longest = max(end - start for start, end in pairwise(starts))
    return FlashLayout(
        _bounds(torch.tensor(starts), device), longest, [_level(nodes, starts, reach, device) for nodes in levels]
    )


def _level(nodes: Sequence[int], starts: Sequence[int], reach: Sequence[int], device: torch.device) -> Level:
    queries = [torch.arange(starts[node + 1], reach[node]) for node in nodes]
    keys = [torch.arange(starts[node], starts[node + 1]) for node in nodes]
    bounds = [torch.tensor([0, *(len(part) for part in parts)]).cumsum(0) for parts in (queries, keys)]
    return Level(
        queries=sent(torch.cat(queries), device),
        keys=sent(torch.cat(keys), device),
        query_bounds=_bounds(bounds[0], device),
        key_bounds=_bounds(bounds[1], device),
        longest_query=max(map(len, queries)),
        longest_key=max(map(len, keys)),
    )


def flash_trie(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: FlashLayout, scale: float | None
) -> torch.Tensor:
    """Compute attention of a row.

    Args:
        query: [T, H, D], float16 or bfloat16.
        key: [T, H_kv, D], H a multiple of H_kv.
        value: [T, H_kv, D].

    Returns:
        [T, H, D].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _FlashTrie.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return out


class _FlashTrie(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: FlashLayout, scale: float
    ) -> torch.Tensor:
        bounds, longest = layout.bounds, _at_least_two(layout.longest)
        part, log_sum, *_ = _forward(query, key, value, bounds, bounds, longest, longest, 0.0, True, False, scale=scale)
        out = part.to(log_sum.dtype) if layout.levels else part
        for level in layout.levels:
            q = query.index_select(0, level.queries)
            k, v = (tensor.index_select(0, level.keys) for tensor in (key, value))
            part, sums, *_ = _forward(q, k, v, *_sizes(level), 0.0, False, False, scale=scale)
            before = log_sum.index_select(1, level.queries)
            weight = (sums - before).sigmoid_().transpose(0, 1)[..., None]
            merged = out.index_select(0, level.queries).lerp_(part.to(out.dtype), weight)
            out.index_copy_(0, level.queries, merged)
            log_sum.index_copy_(1, level.queries, torch.logaddexp(before, sums))
        out = torch.Tensor.to(out, query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        upstream = gradients[0].contiguous()
        bounds, longest = layout.bounds, _at_least_two(layout.longest)
        # Dropout's random state, which nothing reads.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        parts = _backward(
            upstream, query, key, value, out, log_sum, bounds, bounds, longest, longest, 0.0, True, *state, scale=scale
        )
        totals = [part.to(log_sum.dtype) if layout.levels else part for part in parts]
        for level in layout.levels:
            g, q, o = (tensor.index_select(0, level.queries) for tensor in (upstream, query, out))
            k, v = (tensor.index_select(0, level.keys) for tensor in (key, value))
            s = log_sum.index_select(1, level.queries)
            parts = _backward(g, q, k, v, o, s, *_sizes(level), 0.0, False, *state, scale=scale)
            for total, places, part in zip(totals, (level.queries, level.keys, level.keys), parts, strict=True):
                total.index_add_(0, places, part.to(total.dtype))
        to_query, to_key, to_value = (total.to(query.dtype) for total in totals)
        return to_query, to_key, to_value, None, None


def _sizes(level: Level) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return level.query_bounds, level.key_bounds, _at_least_two(level.longest_query), level.longest_key


def _at_least_two(longest: int) -> int:
    """Return an upper bound for the kernel. At 1, with heads that share keys, the kernel swaps heads and queries, and
    with them the order of the log-sums."""
    return max(2, longest)


def _bounds(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return sent(values.to(torch.int32), device)
