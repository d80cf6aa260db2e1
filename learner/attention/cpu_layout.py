"""How the parts of a row's trie are computed on a CPU: in a few batches of like size, whatever the trie's shape.

Blocks of like length (`learner.model.trie_parts`) are one batch, and so are small spans of like size. A large span is a
part of its own: slices of the row, no copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from learner.model.trie_parts import Block, Span, cut

# A batch's shortest block has at least this share of its padded length: that bounds the padding.
SHORTEST_SHARE = 0.8

# Kernels like lengths of whole vectors; below this length the padding would cost more.
ALIGNED_FROM, ALIGNMENT = 32, 8

# A span of so many queries is worth a call of its own.
LARGE_SPAN = 256

# Spans of one batch differ by at most these factors, in queries and in keys.
QUERY_STEP, KEY_STEP = 1.5, 2.0

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockBatch:
    """Blocks padded on the right to `length`; mask: float32 [count, 1, length, length], 0 or -inf; None where all are
    causal."""

    count: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SpanBatch:
    """Spans without a common query, padded on the right. queries: int64 [count * q], T where there is none; keys: int64
    [count * k], some token where there is none; mask: float32 [count, 1, 1, k], None where no key is missing."""

    queries: torch.Tensor
    keys: torch.Tensor
    count: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class TrieLayout:
    """Made once a row, used by every layer.

    tokens: int64 [P], the row's token in each slot of all `blocks`, end to end, any where padded; places: the same, T
    where padded or a copy; slots: int64 [T], the slot that is not a copy of each token of the row; copies: whether a
    token stands in several; batches, spans: small and large spans.
    """

    blocks: list[BlockBatch]
    tokens: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    copies: bool
    batches: list[SpanBatch]
    spans: list[Span]


def trie_layout(starts: Sequence[int], reach: Sequence[int]) -> TrieLayout:
    """For n nodes: `starts`, n + 1 places where each begins and the last ends; `reach`: where what descends from each
    ends."""
    parts = cut(starts, reach)
    size = starts[-1]
    reaches = np.append(np.repeat(np.asarray(reach), np.diff(starts)), 0)
    blocks: list[BlockBatch] = []
    with_copies, without = [], []
    for members, length in _alike(parts.blocks):
        found = _block_places(members, length, size)
        blocks.append(BlockBatch(len(members), length, _mask(found, reaches) if members[0].masked else None))
        own = np.arange(length) >= np.array([[block.copied] for block in members])
        with_copies.append(found.ravel())
        without.append(np.where(own, found, size).ravel())
    tokens, places = (torch.from_numpy(np.concatenate(of)) for of in (with_copies, without))
    slots = torch.empty(size + 1, dtype=torch.int64)
    slots[places] = torch.arange(len(places))
    large = [span for span in parts.spans if span.queries >= LARGE_SPAN]
    batches = [_span_batch(spans, size) for spans in _disjoint(parts.spans)]
    copies = any(block.above for block in parts.blocks)
    return TrieLayout(blocks, tokens.clamp(max=size - 1), places, slots[:size], copies, batches, large)


def _alike(blocks: Sequence[Block]) -> list[tuple[list[Block], int]]:
    """Blocks of like length, masked ones apart, and the length to pad them to."""
    found: list[tuple[list[Block], int]] = []
    for block in sorted(blocks, key=lambda block: (block.masked, -len(block))):
        if found:
            members, length = found[-1]
            if members[0].masked == block.masked and len(block) >= SHORTEST_SHARE * length:
                members.append(block)
                continue
        size = len(block)
        found.append(([block], size if size < ALIGNED_FROM else -(-size // ALIGNMENT) * ALIGNMENT))
    return found


def _disjoint(spans: Sequence[Span]) -> list[list[Span]]:
    """The small ones by size, those that stand within one another apart."""
    found: dict[tuple[int, int, int], list[Span]] = {}
    around: list[tuple[int, int, int]] = []  # (reach, sizes) of the spans that the next one stands in
    for span in spans:
        if span.queries >= LARGE_SPAN:
            continue
        while around and around[-1][0] <= span.start:
            around.pop()
        sizes = int(np.log(span.queries) / np.log(QUERY_STEP)), int(np.log(span.keys) / np.log(KEY_STEP))
        within = sum(other[1:] == sizes for other in around)
        around.append((span.reach, *sizes))
        found.setdefault((*sizes, within), []).append(span)
    return list(found.values())


def _block_places(blocks: Sequence[Block], length: int, nowhere: int) -> Places:
    """int64 [n, length]: the token of the row in each slot, and `nowhere` behind."""
    places = _padded(
        [block.start - block.copied for block in blocks], [len(block) for block in blocks], length, nowhere
    )
    for row, block in zip(places, blocks, strict=True):
        if block.above:
            row[: block.copied] = np.concatenate([np.arange(start, end) for start, end in block.above])
    return places


def _mask(places: Places, reaches: Places) -> torch.Tensor:
    """places: int64 [n, length]; reaches: int64 [T + 1], where what descends from each token of the row ends, and 0."""
    earlier = np.tri(places.shape[1], dtype=bool)
    visible = earlier & (places[:, :, None] < reaches[places][:, None, :]) | np.eye(len(earlier), dtype=bool)
    return torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)[:, None]


def _span_batch(spans: Sequence[Span], size: int) -> SpanBatch:
    """size: T"""
    queries, keys = [span.queries for span in spans], [span.keys for span in spans]
    query_places = _padded([span.end for span in spans], queries, max(queries), size)
    key_places = _padded([span.start for span in spans], keys, max(keys), size)
    mask = None
    if min(keys) < max(keys):
        missing = torch.from_numpy(key_places == size)
        mask = torch.zeros(missing.shape).masked_fill_(missing, -torch.inf)[:, None, None]
    key_tokens = np.minimum(key_places, size - 1)
    return SpanBatch(torch.from_numpy(query_places.ravel()), torch.from_numpy(key_tokens.ravel()), len(spans), mask)


def _padded(starts: Sequence[int], sizes: Sequence[int], length: int, nowhere: int) -> Places:
    """int64 [n, length]: `[start, start + size)` for each, and `nowhere` behind it."""
    offsets = np.arange(length)
    places = np.asarray(starts, dtype=np.int64)[:, None] + offsets
    return np.where(offsets < np.asarray(sizes)[:, None], places, nowhere)
