"""How a row's trie is cut into a few batches of attention of like size, whatever its shape; on a CPU.

Every token sees its path. A row is cut into *blocks*, each of which attends to itself, and *spans*: all that descends
from a node, which stands right behind it, attends to that node. A node is a block, causal; or a node and all that
descends from it, where that is less work than their parts: then a mask tells who sees whom. Blocks of like length are
one batch, and so are small spans of like size. A large span is a part of its own: slices of the row, no copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# What parts cost, forward and backward, as (query, key) pairs of one head in a block of 64 tokens and more: measured on
# one core, head_dim 32. A block has the constant beside its pairs; a span has it for each query: kernels are slow where
# keys are few, and queries are copied and merged.
BLOCK_COST = 600.0
SPAN_COST = 1000.0
SPAN_QUERY_COST = 36.0
SPAN_PAIR_COST = 0.75
# Above it a mask is large and never pays.
LONGEST_MASKED = 256
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
class Block:
    """Tokens `[start, end)` of the row that attend to themselves; masked: several nodes, else one, causal."""

    start: int
    end: int
    masked: bool

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Span:
    """What descends from an inner node: queries `[end, reach)` of the row see keys `[start, end)`."""

    start: int
    end: int
    reach: int

    @property
    def keys(self) -> int:
        return self.end - self.start

    @property
    def queries(self) -> int:
        return self.reach - self.end


@dataclass(frozen=True)
class Parts:
    blocks: list[Block]
    spans: list[Span]


@dataclass(frozen=True)
class BlockBatch:
    """Blocks padded on the right to `length`. places: int64 [count * length], the token of the row in each slot, T
    where there is none; mask: float32 [count, 1, length, length], 0 or -inf; None where all are causal."""

    places: torch.Tensor
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

    places: int64 [P], the slots of all `blocks` end to end, T where padded; tokens: the same, with a token of the row
    in place of T; slots: int64 [T], where in `places` each token of the row is; batches, spans: small and large spans.
    """

    blocks: list[BlockBatch]
    places: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    batches: list[SpanBatch]
    spans: list[Span]


def layout(starts: Sequence[int], reach: Sequence[int]) -> TrieLayout:
    """For n nodes: `starts`, n + 1 places where each begins and the last ends; `reach`: where what descends from each
    ends."""
    parts = cut(starts, reach)
    size = starts[-1]
    reaches = np.append(np.repeat(np.asarray(reach), np.diff(starts)), 0)
    blocks = [_block_batch(members, length, reaches) for members, length in _alike(parts.blocks)]
    places = torch.cat([batch.places for batch in blocks])
    slots = torch.empty(size + 1, dtype=torch.int64)
    slots[places] = torch.arange(len(places))
    large = [span for span in parts.spans if span.queries >= LARGE_SPAN]
    batches = [_span_batch(spans, size) for spans in _disjoint(parts.spans)]
    return TrieLayout(blocks, places, places.clamp(max=size - 1), slots[:size], batches, large)


def cut(starts: Sequence[int], reach: Sequence[int]) -> Parts:
    """The cheapest parts: for each node, from the leaves up, one masked block with all that descends from it or not."""
    nodes = len(reach)
    cost, whole = [0.0] * nodes, [True] * nodes
    roots: list[int] = []  # of the subtrees behind the node
    for node in range(nodes - 1, -1, -1):
        size, total = starts[node + 1] - starts[node], reach[node] - starts[node]
        below = 0.0
        while roots and starts[roots[-1]] < reach[node]:
            below += cost[roots.pop()]
        roots.append(node)
        cost[node] = BLOCK_COST + size * size
        if total > size:
            cost[node] += below + SPAN_COST + (total - size) * (SPAN_QUERY_COST + SPAN_PAIR_COST * size)
            together = BLOCK_COST + total * total
            whole[node] = total <= LONGEST_MASKED and together <= cost[node]
            cost[node] = together if whole[node] else cost[node]
    parts = Parts([], [])
    done = 0
    for node in range(nodes):
        start, end = starts[node], starts[node + 1]
        if start < done:
            continue
        done = reach[node] if whole[node] else end
        parts.blocks.append(Block(start, done, masked=done > end))
        if reach[node] > done:
            parts.spans.append(Span(start, end, reach[node]))
    return parts


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


def _block_batch(blocks: Sequence[Block], length: int, reaches: Places) -> BlockBatch:
    """reaches: int64 [T + 1], where what descends from each token of the row ends, and 0."""
    places = _padded([block.start for block in blocks], [len(block) for block in blocks], length, len(reaches) - 1)
    mask = None
    if blocks[0].masked:
        earlier = np.tri(length, dtype=bool)
        visible = earlier & (places[:, :, None] < reaches[places][:, None, :]) | np.eye(length, dtype=bool)
        mask = torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)[:, None]
    return BlockBatch(torch.from_numpy(places.ravel()), len(blocks), length, mask)


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
