"""Attention along gathered paths, on any device and with a sliding window: shared tokens are computed once a path.

Keys and values are gathered along every path from a root to a leaf. Paths of similar length are padded on the right to
a batch and given to torch's scaled dot product attention with `is_causal`. Right padding needs no mask: a causal query
never sees what comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device. A GPU copies it by itself, and the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# A batch's shortest path has at least this share of its longest: that bounds the padding.
MIN_SHARE = 0.8


@dataclass(frozen=True)
class PathBatch:
    """Paths of similar length.

    Attributes:
        tokens: int64 [count * length], the token of the row in each slot; any where padded.
    """

    tokens: torch.Tensor
    count: int
    length: int


@dataclass(frozen=True)
class Paths:
    """Every path of a row.

    Attributes:
        first: int64 [T], the first slot that holds each token of the row, over all batches end to end.
    """

    batches: list[PathBatch]
    first: torch.Tensor


def layout(starts: Sequence[int], reach: Sequence[int], device: torch.device, min_share: float = MIN_SHARE) -> Paths:
    """Plan a row.

    Args:
        min_share: A batch's shortest path has at least this share of its longest.
        starts: n + 1 indices: where each of the n nodes begins, and where the last ends.
        reach: n indices: where the descendants of each node end.
    """
    found: list[torch.Tensor] = []
    above: list[int] = []
    for node, (start, end, reached) in enumerate(zip(starts, starts[1:], reach, strict=False)):
        above = [ancestor for ancestor in above if reach[ancestor] > start]
        if reached > end:
            above.append(node)
            continue
        found.append(torch.cat([torch.arange(starts[n], starts[n + 1]) for n in [*above, node]]))
    batches: list[PathBatch] = []
    slots, tokens = [], []
    found.sort(key=len, reverse=True)
    offset = place = 0
    while place < len(found):
        length = len(found[place])
        members = [path for path in found[place:] if len(path) >= min_share * length]
        padded = torch.zeros(len(members), length, dtype=torch.int64)
        for i, path in enumerate(members):
            padded[i, : len(path)] = path
            slots.append(offset + i * length + torch.arange(len(path)))
            tokens.append(path)
        batches.append(PathBatch(sent(padded.flatten(), device), len(members), length))
        offset += padded.numel()
        place += len(members)
    first = torch.empty(starts[-1], dtype=torch.int64)
    first[torch.cat(tokens).flip(0)] = torch.cat(slots).flip(0)
    return Paths(batches, sent(first, device))


def along_paths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paths: Paths,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute attention of a row.

    Args:
        query: [T, H, D].
        key: [T, H_kv, D], H a multiple of H_kv.
        value: [T, H_kv, D].
        window: Tokens that a token sees on its path, itself included; None for all.

    Returns:
        [T, H, D].
    """
    found = []
    for batch in paths.batches:
        q, k, v = (
            tensor.index_select(0, batch.tokens).view(batch.count, batch.length, *tensor.shape[1:]).transpose(1, 2)
            for tensor in (query, key, value)
        )
        if window is None or batch.length <= window:
            grouped = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        else:
            out = _windowed(q, k, v, scale, window)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return (found[0] if len(found) == 1 else torch.cat(found)).index_select(0, paths.first)


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int
) -> torch.Tensor:
    """Compute causal attention in stretches of `window` queries: the mask is at most [window, 2 window], whatever the
    length."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))  # masked kernels want as many heads
    stretches = []
    length = query.shape[2]
    for start in range(0, length, window):
        end, first = min(start + window, length), max(0, start - window + 1)
        distance = torch.arange(start, end, device=query.device)[:, None] - torch.arange(
            first, end, device=query.device
        )
        visible = (distance >= 0) & (distance < window)
        stretches.append(
            scaled_dot_product_attention(
                query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], attn_mask=visible, scale=scale
            )
        )
    return torch.cat(stretches, 2)
