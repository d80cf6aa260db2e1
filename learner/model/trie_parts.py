"""Into which parts attention along a row's trie is cut, by what they cost on a CPU. Pure, and made once a row.

Every token sees its path. A row is cut into *blocks*, each of which attends to itself, and *spans*: all that descends
from a node, which stands right behind it, attends to that node. For a node and what descends from it, the cheapest of:

- whole: one block, where a mask tells who sees whom: for a few short branches;
- apart: the node is a block, and a span: for a long node, or one with much below it;
- copied: the node is a block, and stands in front of each of its children's, too: for a short node with long branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# What parts cost, forward and backward, as (query, key) pairs of one head in a block of 64 tokens and more: measured on
# one core, head_dim 32. A block has the constant beside its pairs; a span has it for each query: kernels are slow where
# keys are few, and queries are copied and merged.
BLOCK_COST = 600.0
COPY_COST = 20.0
SPAN_COST = 1000.0
SPAN_QUERY_COST = 36.0
SPAN_PAIR_COST = 0.75
# Above it a mask is large and never pays.
LONGEST_MASKED = 256
# Above it copies are never tried: that bounds the search.
LONGEST_COPIED = 32

Range = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """Tokens `[start, end)` of the row that attend to themselves, behind a copy of those in `above`, their path's;
    masked: several nodes, else one, causal."""

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
    blocks: list[Block] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def cut(starts: Sequence[int], reach: Sequence[int]) -> Parts:
    """The cheapest parts. For n nodes: `starts`, n + 1 places where each begins and the last ends; `reach`: where what
    descends from each ends."""
    costs = _Costs(starts, reach)
    parts = Parts()
    above: dict[int, tuple[Range, ...]] = {}
    done = 0
    for node, (start, end) in enumerate(pairwise(starts)):
        if start < done:
            continue
        copies = above.pop(node, ())
        copied = sum(to - since for since, to in copies)
        if costs.is_whole(node, copied):
            done = reach[node]
            parts.blocks.append(Block(start, done, masked=done > end, above=copies))
            continue
        parts.blocks.append(Block(start, end, above=copies))
        if copied or costs.is_copied(node):
            above.update((child, (*copies, (start, end))) for child in costs.children[node])
        else:
            parts.spans.append(Span(start, end, reach[node]))
    return parts


class _Costs:
    """What nodes cost with all that descends from them, as (query, key) pairs."""

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
        if not self.children[node]:
            return True
        others = self._copying(node, copied) if copied else min(self._apart[node], self._copying(node, 0))
        return self._whole(node, copied) <= others

    def is_copied(self, node: int) -> bool:
        return self._copying(node, 0) < self._apart[node]

    def _together(self, node: int, copied: int) -> float:
        """Without a span, where `copied` tokens of the path stand in front."""
        if not self.children[node]:
            return _block(self._sizes[node], copied)
        return min(self._whole(node, copied), self._copying(node, copied))

    def _whole(self, node: int, copied: int) -> float:
        total = self._totals[node]
        return _block(total, copied) if total + copied <= LONGEST_MASKED else math.inf

    def _copying(self, node: int, copied: int) -> float:
        size = self._sizes[node]
        if copied + size > LONGEST_COPIED:
            return math.inf
        if (node, copied) not in self._below:
            below = sum(self._together(child, copied + size) for child in self.children[node])
            self._below[node, copied] = _block(size, copied) + below
        return self._below[node, copied]


def _block(size: int, copied: int = 0) -> float:
    return BLOCK_COST + COPY_COST * copied + (copied + size) ** 2
