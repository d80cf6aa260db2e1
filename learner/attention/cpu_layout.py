"""Plans attention along a row's trie on a CPU: the cheapest parts of the row, in a few batches of similar size.

Every token sees its path. A row is cut into *blocks*, each of which attends to itself, and *spans*: all descendants of
a node, which stand right behind it, attend to that node. For a node and its descendants the cheapest of three is taken:

- whole: one block with a mask that says who sees whom, for a few short branches;
- apart: the node is a block, and a span, for a long node, or one with many descendants;
- copied: the node is a block, and stands in front of each of its children's too, for a short node with long branches.

Blocks of similar length are one batch, and so are small spans of similar size. A large span is computed on slices of
the row, without copies. No I/O; made once a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

# Costs of parts, forward and backward, in (query, key) pairs of one head in a block of 64 tokens or more, measured on
# one core with head_dim 32. A block costs its pairs and a constant. A span also costs a constant for each query:
# kernels are slow where keys are few, and queries are copied and merged.
BLOCK_COST = 600.0

COPY_COST = 20.0

SPAN_COST = 1000.0

SPAN_QUERY_COST = 36.0

SPAN_PAIR_COST = 0.75

# Tokens above which a block never gets a mask: the mask would be larger than what it saves.
MAX_MASKED_TOKENS = 256

# Tokens above which a path is never copied, which bounds the search.
MAX_COPIED_TOKENS = 32

Range = tuple[int, int]


@dataclass(frozen=True)
class RowBlock:
    """Tokens `[start, end)` of the row that attend to themselves, behind a copy of the tokens of their path in `above`.

    Attributes:
        masked: Whether it holds several nodes and needs a mask; a block of one node is causal.
    """

    start: int
    end: int
    masked: bool = False
    above: tuple[Range, ...] = ()

    @property
    def copied(self) -> int:
        return sum(end - start for start, end in self.above)

    def __len__(self) -> int:
        return self.copied + self.end - self.start


@dataclass(frozen=True)
class RowSpan:
    """The descendants of an inner node: queries `[end, reach)` of the row see keys `[start, end)`."""

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
class RowParts:
    """The blocks and spans of a row."""

    blocks: list[RowBlock] = field(default_factory=list)
    spans: list[RowSpan] = field(default_factory=list)


def cut_row(starts: Sequence[int], reach: Sequence[int]) -> RowParts:
    """Cut a row into its cheapest parts.

    Args:
        starts: n + 1 indices: where each of the n nodes begins, and where the last ends.
        reach: n indices: where the descendants of each node end.
    """
    costs = _Costs(starts, reach)
    parts = RowParts()
    above: dict[int, tuple[Range, ...]] = {}
    done = 0
    for node, (start, end) in enumerate(pairwise(starts)):
        if start < done:
            continue
        copies = above.pop(node, ())
        copied = sum(to - since for since, to in copies)
        if costs.is_whole(node, copied):
            done = reach[node]
            parts.blocks.append(RowBlock(start, done, masked=done > end, above=copies))
            continue
        parts.blocks.append(RowBlock(start, end, above=copies))
        if copied or costs.is_copied(node):
            above.update((child, (*copies, (start, end))) for child in costs.children[node])
        else:
            parts.spans.append(RowSpan(start, end, reach[node]))
    return parts


class _Costs:
    """Costs of nodes with all their descendants, in (query, key) pairs."""

    def __init__(self, starts: Sequence[int], reach: Sequence[int]) -> None:
        nodes = range(len(reach))
        self._sizes = [end - start for start, end in pairwise(starts)]
        self._totals = [reach[node] - starts[node] for node in nodes]
        self.children: list[list[int]] = [[] for _ in nodes]
        self._below: dict[tuple[int, int], float] = {}
        self._apart = [0.0 for _ in nodes]
        cheapest = [0.0 for _ in nodes]
        roots: list[int] = []  # of the subtrees behind the node
        for node in reversed(nodes):
            while roots and starts[roots[-1]] < reach[node]:
                self.children[node].append(roots.pop())
            roots.append(node)
            if self.children[node]:
                size, queries = self._sizes[node], self._totals[node] - self._sizes[node]
                span = SPAN_COST + queries * (SPAN_QUERY_COST + SPAN_PAIR_COST * size)
                self._apart[node] = _block(size) + span + sum(cheapest[child] for child in self.children[node])
                cheapest[node] = min(self._apart[node], self._together(node, 0))
            else:
                cheapest[node] = _block(self._sizes[node])

    def is_whole(self, node: int, copied: int) -> bool:
        """Say whether the node is cheapest as one block with its descendants, behind `copied` tokens."""
        if not self.children[node]:
            return True
        others = self._copying(node, copied) if copied else min(self._apart[node], self._copying(node, 0))
        return self._whole(node, copied) <= others

    def is_copied(self, node: int) -> bool:
        """Say whether copying the node in front of its children's blocks is cheaper than a span."""
        return self._copying(node, 0) < self._apart[node]

    def _together(self, node: int, copied: int) -> float:
        """Return the cost without a span, where `copied` tokens of the path stand in front."""
        if not self.children[node]:
            return _block(self._sizes[node], copied)
        return min(self._whole(node, copied), self._copying(node, copied))

    def _whole(self, node: int, copied: int) -> float:
        total = self._totals[node]
        return _block(total, copied) if total + copied <= MAX_MASKED_TOKENS else math.inf

    def _copying(self, node: int, copied: int) -> float:
        size = self._sizes[node]
        if copied + size > MAX_COPIED_TOKENS:
            return math.inf
        if (node, copied) not in self._below:
            below = sum(self._together(child, copied + size) for child in self.children[node])
            self._below[node, copied] = _block(size, copied) + below
        return self._below[node, copied]


def _block(size: int, copied: int = 0) -> float:
    return BLOCK_COST + COPY_COST * copied + (copied + size) ** 2


# A batch's shortest block has at least this share of its padded length: that bounds the padding.
MIN_SHARE = 0.8

# Kernels are fastest at lengths of whole vectors; below this length the padding would cost more.
ALIGNED_FROM, ALIGNMENT = 32, 8

# A span of this many queries or more is worth its own call.
LARGE_SPAN = 256

# Spans of one batch differ by at most these factors, in queries and in keys.
QUERY_STEP, KEY_STEP = 1.5, 2.0

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockBatch:
    """Blocks padded on the right to `length`.

    Attributes:
        mask: float32 [count, 1, length, length], 0 or -inf; None where all blocks are causal.
    """

    count: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SpanBatch:
    """Spans without a common query, padded on the right.

    Attributes:
        queries: int64 [count * q], T where there is none.
        keys: int64 [count * k], any token where there is none.
        mask: float32 [count, 1, 1, k]; None where no key is missing.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    count: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class TrieLayout:
    """The batches of a row, made once and used by every layer.

    Attributes:
        tokens: int64 [P], the row's token in each slot of all `blocks`, end to end; any where padded.
        places: int64 [P], the same, but T where padded or a copy.
        slots: int64 [T], for each token of the row the slot that is not a copy.
        copies: Whether a token stands in several slots.
        batches: Small spans.
        spans: Large spans.
    """

    blocks: list[BlockBatch]
    tokens: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    copies: bool
    batches: list[SpanBatch]
    spans: list[RowSpan]


def trie_layout(starts: Sequence[int], reach: Sequence[int]) -> TrieLayout:
    """Plan a row.

    Args:
        starts: n + 1 indices: where each of the n nodes begins, and where the last ends.
        reach: n indices: where the descendants of each node end.
    """
    parts = cut_row(starts, reach)
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


def _alike(blocks: Sequence[RowBlock]) -> list[tuple[list[RowBlock], int]]:
    """Group blocks of similar length, masked ones apart, with the length to pad them to."""
    found: list[tuple[list[RowBlock], int]] = []
    for block in sorted(blocks, key=lambda block: (block.masked, -len(block))):
        if found:
            members, length = found[-1]
            if members[0].masked == block.masked and len(block) >= MIN_SHARE * length:
                members.append(block)
                continue
        size = len(block)
        found.append(([block], size if size < ALIGNED_FROM else -(-size // ALIGNMENT) * ALIGNMENT))
    return found


def _disjoint(spans: Sequence[RowSpan]) -> list[list[RowSpan]]:
    """Group small spans by size. No span of a group lies within another of the group."""
    found: dict[tuple[int, int, int], list[RowSpan]] = {}
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


def _block_places(blocks: Sequence[RowBlock], length: int, nowhere: int) -> Places:
    """Return the token of the row in each slot, and `nowhere` behind, int64 [n, length]."""
    places = _padded(
        [block.start - block.copied for block in blocks], [len(block) for block in blocks], length, nowhere
    )
    for row, block in zip(places, blocks, strict=True):
        if block.above:
            row[: block.copied] = np.concatenate([np.arange(start, end) for start, end in block.above])
    return places


def _mask(places: Places, reaches: Places) -> torch.Tensor:
    """Make the mask of masked blocks.

    Args:
        places: int64 [n, length], tokens of the row.
        reaches: int64 [T + 1], where the descendants of each token of the row end, and 0.
    """
    earlier = np.tri(places.shape[1], dtype=bool)
    visible = earlier & (places[:, :, None] < reaches[places][:, None, :]) | np.eye(len(earlier), dtype=bool)
    return torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)[:, None]


def _span_batch(spans: Sequence[RowSpan], size: int) -> SpanBatch:
    """Make one batch of small spans of a row of `size` tokens."""
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
    """Return `[start, start + size)` for each, and `nowhere` behind it, int64 [n, length]."""
    offsets = np.arange(length)
    places = np.asarray(starts, dtype=np.int64)[:, None] + offsets
    return np.where(offsets < np.asarray(sizes)[:, None], places, nowhere)
