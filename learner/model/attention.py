"""Attention along the paths of a packed row, on any device: `attention = "varlen_sdpa"`.

On a CPU the row's trie is computed as it stands (`learner.model.trie_attention`). Elsewhere keys and values are
gathered along every sequence's path, and sequences of similar length are padded on the right to a batch and given to
torch's scaled dot product attention with `is_causal`. Right padding needs no mask: a causal query never sees what comes
after it. So the result is exact, the flash kernels apply, and no [T, T] mask is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from learner.feed.packing import PackedRow
from learner.model import trie_attention
from learner.model.trie_attention import Bucket, TrieLayout
from protocol.config import ConfigError

NAME = "varlen_sdpa"

# Arguments by which models change what attention computes; ignoring one would train on wrong log-probs.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "attn_logit_softcapping")


@dataclass(frozen=True)
class Layout:
    """How a row's attention is computed; made once a row, used by every layer. `trie` on a CPU, `paths` elsewhere;
    longest: tokens of the longest sequence."""

    longest: int
    trie: TrieLayout | None = None
    paths: Paths | None = None


@dataclass(frozen=True)
class Paths:
    """Every path of a row, one behind the other. tokens: int64 [t], where in the row each token of the paths stands;
    first: int64 [T], where in `tokens` a token of the row is found first; buckets: paths of similar length."""

    tokens: torch.Tensor
    first: torch.Tensor
    buckets: list[Bucket]


def layout(row: PackedRow, device: torch.device) -> Layout:
    if device.type == "cpu":
        return Layout(row.longest, trie=trie_attention.layout(row.starts, row.reach))
    return Layout(row.longest, paths=paths(row, device))


def paths(row: PackedRow, device: torch.device) -> Paths:
    """The ways from a root to each leaf."""
    found: list[torch.Tensor] = []
    above: list[int] = []
    for node, (start, end, reach) in enumerate(zip(row.starts, row.starts[1:], row.reach, strict=False)):
        above = [ancestor for ancestor in above if row.reach[ancestor] > start]
        if reach > end:
            above.append(node)
            continue
        nodes = [*above, node]
        found.append(torch.cat([torch.arange(row.starts[n], row.starts[n + 1]) for n in nodes]))
    tokens = torch.cat(found)
    first = torch.empty(row.tokens, dtype=torch.int64)
    first[tokens.flip(0)] = torch.arange(len(tokens)).flip(0)
    starts = [0, *torch.tensor([len(path) for path in found]).cumsum(0).tolist()]
    apart = trie_attention.layout(starts, starts[1:])
    buckets = [replace(b, tokens=_sent(b.tokens, device), slots=_sent(b.slots, device)) for b in apart.buckets]
    return Paths(_sent(tokens, device), _sent(first, device), buckets)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`; a GPU fetches it by itself, so that nobody waits for what the GPU still computes."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def model_arguments(implementation: str, row: PackedRow) -> dict[str, Any]:
    """What a transformers model needs, beside ids and positions, to keep the sequences of `row` apart."""
    if implementation == NAME:
        return {"row_layout": layout(row, row.input_ids.device)}
    bounds = _sent(torch.tensor(row.starts, dtype=torch.int32), row.input_ids.device)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": row.longest,
        "max_length_k": row.longest,
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
    row_layout: Layout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers' `AttentionInterface`.

    query: [1, H, T, D]; key, value: [1, H_kv, T, D], H a multiple of H_kv; returns [1, T, H, D]. There is no dropout,
    on purpose: log-probs must be those of the policy that sampled.
    """
    if sliding_window is not None and row_layout.longest > sliding_window:
        raise ConfigError(
            f"model.attention = {NAME} has no sliding window, and a sequence of {row_layout.longest} tokens is "
            f"longer than the model's window of {sliding_window}: use flash_attention_2, or lower vllm.max_model_len "
            f"to {sliding_window}"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"model.attention = {NAME} does not support {name}, which this model uses: choose another"
            )
    width = value.shape[-1]
    if width < key.shape[-1]:  # latent attention (DeepSeek): the kernels want values as wide as keys
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
    # Under autocast a norm leaves queries and keys in float32, and `value` is as its layer computed it.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    if row_layout.trie is not None:
        return trie_attention.trie_attention(q, k, v, row_layout.trie, scaling)[None, ..., :width], None
    assert row_layout.paths is not None
    return along_paths(q, k, v, row_layout.paths, scaling)[None, ..., :width], None


def along_paths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paths: Paths, scale: float | None
) -> torch.Tensor:
    """query: [T, H, D]; key, value: [T, H_kv, D], H a multiple of H_kv; returns [T, H, D]."""
    rows = [tensor[paths.tokens] for tensor in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    out = torch.empty_like(rows[0])
    for bucket in paths.buckets:
        q, k, v = (trie_attention.pad(row, bucket) for row in rows)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        out = out.index_copy(0, bucket.tokens, trie_attention.unpad(attended, bucket))
    return out[paths.first]


# transformers builds a 4-D mask only for implementations in its mask interface, where this one has no entry.
AttentionInterface.register(NAME, varlen_sdpa)
