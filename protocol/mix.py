"""Divides tickets among the parts of a data set (`task.mix`): the same in every process, by the index alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# Tickets after which the parts come in the same order again: shares hold exactly over so many, in whole tickets.
MIX_CYCLE = 1000


class PartPosition(NamedTuple):
    """A part of the data set, and the position of a ticket among the tickets of that part."""

    part: str
    position: int


class Mix:
    """Divides the tickets of a run among the parts of its data set.

    Of every `MIX_CYCLE` tickets each part gets its share, rounded by largest remainder, and spread evenly: the parts'
    tickets number j of n stand in the order of (j + 1/2) / n.

    Args:
        shares: By part, each at least 0; they sum to 1. A share above 0 is at least 1 / MIX_CYCLE.

    Attributes:
        parts: Names of all parts, in their order. `drawn`: of those with a share.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.parts = sorted(shares)
        exact = np.array([shares[name] for name in self.parts]) * MIX_CYCLE
        counts = np.floor(exact).astype(np.int64)
        left = MIX_CYCLE - int(counts.sum())
        for number in sorted(range(len(counts)), key=lambda of: counts[of] - exact[of])[:left]:
            counts[number] += 1
        self.drawn = [name for name, count in zip(self.parts, counts, strict=True) if count]
        self._counts = counts
        turns = [((nth + 0.5) / count, number, nth) for number, count in enumerate(counts) for nth in range(count)]
        self._cycle = [(number, nth) for _, number, nth in sorted(turns)]

    def place(self, index: int) -> PartPosition:
        """Return the part that a running index belongs to, and its position there."""
        cycle, turn = divmod(index, MIX_CYCLE)
        number, nth = self._cycle[turn]
        return PartPosition(self.parts[number], cycle * int(self._counts[number]) + nth)
