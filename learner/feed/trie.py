"""Arranges the samples of a row as a prefix trie in depth-first order, so that shared tokens stand there once.

Sorted by their tokens, each sample adds only what follows its common prefix with the one before it. These runs, end to
end, are the trie's nodes in depth-first order, and all descendants of a token stand right behind it: token i sees token
j exactly if j <= i < reach[j].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trie:
    """A row's tokens and how they descend from each other.

    Attributes:
        token_ids: int64 [T].
        depths: int64 [T].
        starts: int32 [n + 1], where each node begins, and T.
        reach: int32 [n], where the descendants of each node end.
        order: Indices of the samples as they were sorted.
        places: For each sample in that order, int64 [its length], the index in the row of each of its tokens.
    """

    token_ids: Ids
    depths: Ids
    starts: npt.NDArray[np.int32]
    reach: npt.NDArray[np.int32]
    order: list[int]
    places: list[Ids]

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def sorted_order(sequences: Sequence[npt.NDArray[np.int32]]) -> list[int]:
    """Return indices in an order in which sequences with a common prefix stand together."""
    return sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())


def shared(before: npt.NDArray[np.int32], sequence: npt.NDArray[np.int32], branches: bool) -> int:
    """Count the first tokens of `sequence` that the row already has from its neighbour `before`."""
    size = min(len(before), len(sequence))
    differ = before[:size] != sequence[:size]
    first = int(differ.argmax()) if size else 0
    common = first if size and differ[first] else size
    return common if branches or common == len(before) else 0


def build(sequences: Sequence[npt.NDArray[np.int32]], branches: bool = True) -> Trie:
    """Build the trie.

    Args:
        sequences: int32 [T_i] each, T_i >= 1.
        branches: False for attention that knows whole sequences only: then every path is its own node, and a
            sequence shares tokens with another only if one is the beginning of the other.
    """
    order = sorted_order(sequences)
    runs: list[npt.NDArray[np.int32]] = []
    depths: list[Ids] = []
    places: list[Ids] = []
    nodes: list[tuple[int, int, int]] = []
    open_pieces: list[_Piece] = []
    path = np.empty(0, dtype=np.int64)
    before = np.empty(0, dtype=np.int32)
    end = 0
    for index in order:
        sequence = sequences[index]
        kept = shared(before, sequence, branches)
        _close(open_pieces, kept, end, nodes)
        size = len(sequence) - kept
        last = open_pieces[-1] if open_pieces else None
        if last is not None and last.start + last.size == end:
            last.size += size  # it continues where the one before ends
        elif size:
            open_pieces.append(_Piece(end, kept, size))
        runs.append(sequence[kept:])
        depths.append(np.arange(kept, len(sequence)))
        path = np.concatenate([path[:kept], np.arange(end, end + size)])
        places.append(path)
        before, end = sequence, end + size
    _close(open_pieces, 0, end, nodes)
    nodes.sort()
    return Trie(
        token_ids=np.concatenate(runs).astype(np.int64),
        depths=np.concatenate(depths),
        starts=np.array([start for start, _, _ in nodes] + [end], dtype=np.int32),
        reach=np.array([reach for _, _, reach in nodes], dtype=np.int32),
        order=order,
        places=places,
    )


@dataclass
class _Piece:
    """Tokens `[start, start + size)` of the row, the first at `depth`, which may still get descendants."""

    start: int
    depth: int
    size: int


def _close(pieces: list[_Piece], depth: int, end: int, nodes: list[tuple[int, int, int]]) -> None:
    """Complete the nodes (start, end, reach) of tokens at `depth` or below, which get no more descendants."""
    while pieces and pieces[-1].depth + pieces[-1].size > depth:
        piece = pieces.pop()
        kept = max(0, depth - piece.depth)
        nodes.append((piece.start + kept, piece.start + piece.size, end))
        if kept:
            pieces.append(_Piece(piece.start, piece.depth, kept))
            return
