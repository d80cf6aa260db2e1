"""Attention along the paths of a prefix trie on a CPU: nothing is computed twice, and no mask has the size of the row.

A row holds the trie's nodes in depth-first order (`slipstream.learner.feed.trie`) and is computed in the parts of
`learner.attention.cpu_layout`. They are merged by the log of their softmax sums (arXiv:2205.14135, section 3.1). The
backward pass gives each part's kernel the *merged* output and log-sum, so the parts' gradients add up to the whole's.
Autograd through the merge would be silently wrong, as the gradient of the log-sums is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.learner.attention.cpu_layout import TrieLayout

# Both support heads that share keys. A mask is float64 for float64 queries, and may be float32 for all others.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Tokens of the longest sequence from which on the kernels are faster in 16 bits. At 10 tokens their backward pass takes
# 33 ms in bfloat16 and 2.5 ms in float32; at 50, 26 and 6; at 512 they draw (one core with AVX-512 and without AMX).
MIN_16_BIT_TOKENS = 512


def fastest_type(dtype: torch.dtype, longest: int) -> torch.dtype:
    """Return the type in which attention is fastest for a row.

    Args:
        dtype: Type of queries, keys and values.
        longest: Tokens of the row's longest sequence.
    """
    return torch.float32 if dtype.itemsize == 2 and longest < MIN_16_BIT_TOKENS else dtype


def trie_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TrieLayout, scale: float | None
) -> torch.Tensor:
    """Compute attention of a row.

    Args:
        query: [T, H, D], any floating type.
        key: [T, H_kv, D], H a multiple of H_kv.
        value: [T, H_kv, D].

    Returns:
        [T, H, D].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _TrieAttention.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return out


class _TrieAttention(torch.autograd.Function):
    """Slots without a token have the log-sum +inf: their softmax, exp(score - inf), is 0, and so is all that they would
    add to an output or a gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TrieLayout, scale: float
    ) -> torch.Tensor:
        rows = [tensor.index_select(0, layout.tokens) for tensor in (query, key, value)]
        parts, sums = [], []
        first = 0
        for block in layout.blocks:
            inside = slice(first, first + block.count * block.length)
            q, k, v = (_batched(row[inside], block.count) for row in rows)
            part, log_sum = _forward(q, k, v, 0.0, block.mask is None, attn_mask=_mask(block.mask, query), scale=scale)
            parts.append(_flat(part))
            sums.append(log_sum.transpose(1, 2).flatten(0, 1))
            first = inside.stop
        out = _joined(parts).index_select(0, layout.slots)
        log_sum = _ended(_joined(sums).index_select(0, layout.slots))
        if layout.batches or layout.spans:
            whole = _ended(out.to(log_sum.dtype), 0.0)
            _add_spans(whole, log_sum, query, key, value, layout, scale)
            out = whole[:-1].to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        upstream = gradients[0]
        rows = [tensor.index_select(0, layout.tokens) for tensor in (upstream, query, key, value, out)]
        sums = log_sum.index_select(0, layout.places)
        found: list[list[torch.Tensor]] = [[], [], []]
        first = 0
        for block in layout.blocks:
            inside = slice(first, first + block.count * block.length)
            g, q, k, v, o = (_batched(row[inside], block.count) for row in rows)
            s = _batched_sums(sums[inside], block.count)
            causal = block.mask is None
            for to, part in zip(
                found,
                _backward(g, q, k, v, o, s, 0.0, causal, attn_mask=_mask(block.mask, query), scale=scale),
                strict=True,
            ):
                to.append(_flat(part))
            first = inside.stop
        totals = [_joined(found[0]).index_select(0, layout.slots)]
        for tensor, of in zip((key, value), found[1:], strict=True):
            if layout.copies:
                total = log_sum.new_zeros(tensor.shape).index_add_(0, layout.tokens, _joined(of).to(log_sum.dtype))
            else:
                total = _joined(of).index_select(0, layout.slots)
            totals.append(total)
        if layout.batches or layout.spans:
            totals = [total.to(log_sum.dtype) for total in totals]
            _add_span_gradients(totals, upstream, query, key, value, out, log_sum, layout, scale)
        to_query, to_key, to_value = (total.to(query.dtype) for total in totals)
        return to_query, to_key, to_value, None, None


def _add_spans(
    out: torch.Tensor,
    log_sum: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TrieLayout,
    scale: float,
) -> None:
    """Add the spans' keys to the output, [T + 1, H, D], and to the log-sums, [T + 1, H], in place."""
    for span in layout.spans:
        inside, keys = slice(span.end, span.reach), slice(span.start, span.end)
        q, k, v = (_batched(tensor, 1) for tensor in (query[inside], key[keys], value[keys]))
        part, sums = _forward(q, k, v, 0.0, False, scale=scale)
        before, sums = log_sum[inside], sums[0].transpose(0, 1)
        out[inside].lerp_(_flat(part).to(out.dtype), (sums - before).sigmoid_()[..., None])
        log_sum[inside] = torch.logaddexp(before, sums)
    for batch in layout.batches:
        tokens = batch.queries.clamp(max=len(query) - 1)
        q = _batched(query.index_select(0, tokens), batch.count)
        k, v = (_batched(tensor.index_select(0, batch.keys), batch.count) for tensor in (key, value))
        part, sums = _forward(q, k, v, 0.0, False, attn_mask=_mask(batch.mask, query), scale=scale)
        before, sums = log_sum.index_select(0, batch.queries), sums.transpose(1, 2).flatten(0, 1)
        change = _flat(part).to(out.dtype) - out.index_select(0, batch.queries)
        out.index_add_(0, batch.queries, change.mul_((sums - before).sigmoid_()[..., None]))
        log_sum.index_copy_(0, batch.queries, torch.logaddexp(before, sums))


def _add_span_gradients(
    totals: list[torch.Tensor],
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    layout: TrieLayout,
    scale: float,
) -> None:
    """Add the spans' gradients to `totals` (of query, key and value), in place."""
    to_query, to_key, to_value = totals
    for span in layout.spans:
        inside, keys = slice(span.end, span.reach), slice(span.start, span.end)
        g, q, o = (_batched(tensor[inside], 1) for tensor in (upstream, query, out))
        k, v = (_batched(tensor[keys], 1) for tensor in (key, value))
        s = _batched_sums(log_sum[inside], 1)
        dq, dk, dv = _backward(g, q, k, v, o, s, 0.0, False, scale=scale)
        to_query[inside] += _flat(dq)
        to_key[keys] += _flat(dk)
        to_value[keys] += _flat(dv)
    for batch in layout.batches:
        tokens = batch.queries.clamp(max=len(query) - 1)
        g, q, o = (_batched(tensor.index_select(0, tokens), batch.count) for tensor in (upstream, query, out))
        k, v = (_batched(tensor.index_select(0, batch.keys), batch.count) for tensor in (key, value))
        s = _batched_sums(log_sum.index_select(0, batch.queries), batch.count)
        dq, dk, dv = _backward(g, q, k, v, o, s, 0.0, False, attn_mask=_mask(batch.mask, query), scale=scale)
        to_query.index_add_(0, tokens, _flat(dq).to(to_query.dtype))
        to_key.index_add_(0, batch.keys, _flat(dk).to(to_key.dtype))
        to_value.index_add_(0, batch.keys, _flat(dv).to(to_value.dtype))


def _mask(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    return mask.double() if mask is not None and query.dtype == torch.float64 else mask


def _batched(flat: torch.Tensor, count: int) -> torch.Tensor:
    """[count * length, H, D] -> [count, H, length, D], a view"""
    return flat.view(count, len(flat) // count, *flat.shape[1:]).transpose(1, 2)


def _batched_sums(flat: torch.Tensor, count: int) -> torch.Tensor:
    """[count * length, H] -> [count, H, length]"""
    return flat.view(count, len(flat) // count, *flat.shape[1:]).transpose(1, 2)


def _flat(batched: torch.Tensor) -> torch.Tensor:
    """[count, H, length, D] -> [count * length, H, D]"""
    return batched.transpose(1, 2).flatten(0, 1)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ended(rows: torch.Tensor, value: float = torch.inf) -> torch.Tensor:
    """[T, ...] -> [T + 1, ...], the last filled with `value`."""
    return torch.cat([rows, rows.new_full((1, *rows.shape[1:]), value)])
