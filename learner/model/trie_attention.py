"""Attention along the paths of a prefix trie, on a CPU: no mask, no copy of keys, nothing computed twice.

A row holds the trie's nodes in depth-first order (`learner.feed.trie`). Every node attends causally to itself; then
all that descends from an inner node, which stands right behind it, attends to that node without a mask. The parts are
merged by the log of their softmax sums (arXiv:2205.14135, section 3.1). The backward gives each part's kernel the
*merged* output and log-sum: the gradients of the parts then add up to the whole's. Under autograd the merge would be
silently wrong, as the gradient of the log-sums is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

# A bucket's shortest node has at least this share of its longest: that bounds the padding.
SHORTEST_SHARE = 0.8

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Bucket:
    """Nodes of similar length, padded on the right to `length`: a causal query never sees the padding.

    tokens: int64 [t], where they stand in the row; slots: int64 [t], where in the flattened [count * length].
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    count: int
    length: int


@dataclass(frozen=True)
class Span:
    """What descends from an inner node: queries `[end, reach)` of the row see keys `[start, end)`."""

    start: int
    end: int
    reach: int


@dataclass(frozen=True)
class TrieLayout:
    """How a row's attention is computed; made once a row, used by every layer."""

    buckets: list[Bucket]
    spans: list[Span]
    tokens: int


def layout(starts: Sequence[int], reach: Sequence[int]) -> TrieLayout:
    """For n nodes: `starts`, n + 1 places where each begins and the last ends; `reach`: where what descends from each
    ends."""
    lengths = [end - start for start, end in pairwise(starts)]
    by_length = sorted(range(len(lengths)), key=lambda node: -lengths[node])
    buckets: list[Bucket] = []
    first = 0
    for place in range(1, len(by_length) + 1):
        longest = lengths[by_length[first]]
        if place < len(by_length) and lengths[by_length[place]] >= SHORTEST_SHARE * longest:
            continue
        members = by_length[first:place]
        tokens = torch.cat([torch.arange(starts[node], starts[node + 1]) for node in members])
        slots = torch.cat([torch.arange(lengths[node]) + i * longest for i, node in enumerate(members)])
        buckets.append(Bucket(tokens, slots, len(members), longest))
        first = place
    spans = [Span(starts[node], starts[node + 1], end) for node, end in enumerate(reach) if end > starts[node + 1]]
    return TrieLayout(buckets, spans, starts[-1])


def trie_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TrieLayout, scale: float | None
) -> torch.Tensor:
    """query: [T, H, D]; key, value: [T, H_kv, D], H a multiple of H_kv; returns [T, H, D]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _TrieAttention.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return out


class _TrieAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TrieLayout, scale: float
    ) -> torch.Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sum = query.new_empty(
            query.shape[:2], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32
        )
        groups = query.shape[1] // key.shape[1]
        for bucket in layout.buckets:
            q = pad(query, bucket)
            k, v = (pad(tensor, bucket).repeat_interleave(groups, 1) for tensor in (key, value))
            part, sums = _forward(q, k, v, 0.0, True, scale=scale)
            out[bucket.tokens] = unpad(part, bucket)
            log_sum[bucket.tokens] = sums.transpose(1, 2).flatten(0, 1)[bucket.slots]
        for span in layout.spans:
            q = _folded(query[span.end : span.reach], groups)
            k, v = (tensor[span.start : span.end].transpose(0, 1)[None] for tensor in (key, value))
            part, sums = _forward(q, k, v, 0.0, False, scale=scale)
            _merge(
                out[span.end : span.reach],
                log_sum[span.end : span.reach],
                _unfolded(part, groups),
                _unfolded(sums[..., None], groups)[..., 0],
            )
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.layout, ctx.scale, ctx.groups = layout, scale, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        layout, scale, groups = ctx.layout, ctx.scale, ctx.groups
        upstream = gradients[0]
        to_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        to_key, to_value = (torch.empty_like(key, memory_format=torch.contiguous_format) for _ in range(2))
        for bucket in layout.buckets:
            q, o, g = (pad(tensor, bucket) for tensor in (query, out, upstream))
            k, v = (pad(tensor, bucket).repeat_interleave(groups, 1) for tensor in (key, value))
            sums = log_sum.new_zeros(bucket.count * bucket.length, log_sum.shape[1])
            sums = sums.index_copy(0, bucket.slots, log_sum[bucket.tokens])
            sums = sums.view(bucket.count, bucket.length, -1).transpose(1, 2)
            dq, dk, dv = _backward(g, q, k, v, o, sums, 0.0, True, scale=scale)
            to_query[bucket.tokens] = unpad(dq, bucket)
            for whole, part in ((to_key, dk), (to_value, dv)):
                whole[bucket.tokens] = unpad(part.unflatten(1, (-1, groups)).sum(2), bucket)
        for span in layout.spans:
            inside = slice(span.end, span.reach)
            q, o, g = (_folded(tensor[inside], groups) for tensor in (query, out, upstream))
            k, v = (tensor[span.start : span.end].transpose(0, 1)[None] for tensor in (key, value))
            sums = _folded(log_sum[inside, :, None], groups)[..., 0]
            dq, dk, dv = _backward(g, q, k, v, o, sums, 0.0, False, scale=scale)
            to_query[inside] += _unfolded(dq, groups)
            to_key[span.start : span.end] += dk[0].transpose(0, 1)
            to_value[span.start : span.end] += dv[0].transpose(0, 1)
        return to_query, to_key, to_value, None, None


def _merge(out: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, sums: torch.Tensor) -> None:
    """In place: softmax over both sets of keys, from the outputs [t, H, D] and log-sums [t, H] over each."""
    whole = torch.logaddexp(log_sum, sums)
    out.mul_((log_sum - whole).exp_()[..., None]).add_(part * (sums - whole).exp_()[..., None])
    log_sum.copy_(whole)


def pad(tokens: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[T, H, D] -> [count, H, length, D]"""
    chosen = tokens[bucket.tokens]
    if len(bucket.slots) < bucket.count * bucket.length:
        empty = tokens.new_zeros(bucket.count * bucket.length, *tokens.shape[1:])
        chosen = empty.index_copy(0, bucket.slots, chosen)
    return chosen.view(bucket.count, bucket.length, *tokens.shape[1:]).transpose(1, 2)


def unpad(padded: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[count, H, length, D] -> [t, H, D]"""
    tokens = padded.transpose(1, 2).flatten(0, 1)
    return tokens[bucket.slots] if len(bucket.slots) < len(tokens) else tokens


def _folded(tokens: torch.Tensor, groups: int) -> torch.Tensor:
    """[t, H_kv * groups, D] -> [1, H_kv, groups * t, D]: without a mask, the heads that share keys are more queries."""
    size, heads, width = tokens.shape
    return tokens.view(size, heads // groups, groups, width).permute(1, 2, 0, 3).flatten(1, 2)[None]


def _unfolded(folded: torch.Tensor, groups: int) -> torch.Tensor:
    """[1, H_kv, groups * t, D] -> [t, H_kv * groups, D]"""
    _, heads, size, width = folded.shape
    return folded.view(heads, groups, size // groups, width).permute(2, 0, 1, 3).flatten(1, 2)
