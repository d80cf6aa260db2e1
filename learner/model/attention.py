"""Attention within the sequences of a packed row, on any device: `attention = "varlen_sdpa"`.

Sequences of similar length are padded on the right to a batch and given to torch's scaled dot product attention with
`is_causal`. Right padding needs no mask: a causal query never sees what comes after it. So the result is exact, the
flash kernels apply, and no [T, T] mask is ever built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from learner.feed.packing import PackedRow
from protocol.config import ConfigError

NAME = "varlen_sdpa"

# A bucket's shortest sequence has at least this share of its longest: that bounds the padding.
SHORTEST_SHARE = 0.8

# Arguments by which models change what attention computes; ignoring one would train on wrong log-probs.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "attn_logit_softcapping")


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences of a row: its tokens `[start, end)`, `count` sequences padded to `length`.

    slots: int64 [end - start], the place of each token in the flattened [count * length], or None where the
    sequences are equally long and need no padding.
    """

    start: int
    end: int
    count: int
    length: int
    slots: torch.Tensor | None


@dataclass(frozen=True)
class Layout:
    """How a row is cut into buckets; computed once a row, used by every layer."""

    buckets: list[Bucket]
    max_seqlen: int


def layout(lengths: Sequence[int], device: torch.device) -> Layout:
    """Buckets of neighbouring sequences of similar length. A row sorted by length gives the fewest."""
    buckets: list[Bucket] = []
    start = first = 0
    for i in range(1, len(lengths) + 1):
        members = lengths[first : i + 1]
        if i < len(lengths) and min(members) >= SHORTEST_SHARE * max(members):
            continue
        bucket = _bucket(start, list(lengths[first:i]), device)
        buckets.append(bucket)
        start, first = bucket.end, i
    return Layout(buckets, max(lengths))


def _bucket(start: int, lengths: list[int], device: torch.device) -> Bucket:
    length, tokens = max(lengths), sum(lengths)
    slots = None
    if min(lengths) < length:
        slots = torch.cat([torch.arange(n) + i * length for i, n in enumerate(lengths)]).to(device)
    return Bucket(start, start + tokens, len(lengths), length, slots)


def model_arguments(implementation: str, row: PackedRow) -> dict[str, Any]:
    """What a transformers model needs, beside ids and positions, to keep the sequences of `row` apart."""
    if implementation == NAME:
        return {"varlen_layout": layout(row.cu_seqlens.diff().tolist(), row.input_ids.device)}
    return {
        "cu_seq_lens_q": row.cu_seqlens,
        "cu_seq_lens_k": row.cu_seqlens,
        "max_length_q": row.max_seqlen,
        "max_length_k": row.max_seqlen,
    }


def varlen_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    varlen_layout: Layout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' `AttentionInterface`.

    query: [1, H, T, D]; key, value: [1, H_kv, T, D], H a multiple of H_kv; returns [1, T, H, D]. There is no dropout,
    on purpose: log-probs must be those of the policy that sampled.
    """
    if sliding_window is not None and varlen_layout.max_seqlen > sliding_window:
        raise ConfigError(
            f"model.attention = {NAME} has no sliding window, and a sequence of {varlen_layout.max_seqlen} tokens is "
            f"longer than the model's window of {sliding_window}: use flash_attention_2, or lower vllm.max_model_len "
            f"to {sliding_window}"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"model.attention = {NAME} does not support {name}, which this model uses: choose another"
            )
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for bucket in varlen_layout.buckets:
        q, k, v = (_pad(row[bucket.start : bucket.end], bucket).transpose(1, 2) for row in rows)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(_unpad(attended.transpose(1, 2), bucket))
    return torch.cat(outputs)[None], None


def _pad(tokens: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[t, H, D] -> [count, length, H, D]"""
    if bucket.slots is not None:
        empty = tokens.new_zeros(bucket.count * bucket.length, *tokens.shape[1:])
        tokens = empty.index_copy(0, bucket.slots, tokens)
    return tokens.view(bucket.count, bucket.length, *tokens.shape[1:])


def _unpad(padded: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[count, length, H, D] -> [t, H, D]"""
    tokens = padded.flatten(0, 1)
    return tokens if bucket.slots is None else tokens.index_select(0, bucket.slots)


# transformers builds a 4-D mask only for implementations in its mask interface, where this one has no entry.
AttentionInterface.register(NAME, varlen_sdpa)
