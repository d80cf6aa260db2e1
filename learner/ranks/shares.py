"""A step's rows, dealt to the ranks: about equal work for each, and the same number of rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from learner.algorithm.rollouts import StepRollouts
from learner.feed.packing import PackedRow, padding_row


@dataclass(frozen=True)
class Share:
    """What one rank does of a step. rows: its own; rollouts: the whole step's; surveyed: whether all rows are scored
    before the first one trains."""

    rows: Sequence[PackedRow]
    rollouts: StepRollouts
    surveyed: bool

    def plain(self) -> dict[str, Any]:
        """As `wire` takes it."""
        return {
            "rows": [vars(row) for row in self.rows],
            "rollouts": vars(self.rollouts),
            "surveyed": self.surveyed,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Share:
        rows = [PackedRow(**row) for row in plain["rows"]]
        return cls(rows, StepRollouts(**plain["rollouts"]), plain["surveyed"])


def deal(rows: Sequence[PackedRow], ranks: int) -> list[list[PackedRow]]:
    """Each rank's rows, rank 0's first: the dearest row goes to the rank with the least work that has room.

    All have as many, since each forward of a sharded policy takes all ranks: where rows do not suffice, a rank gets
    padding, which trains nothing.
    """
    most = -(-len(rows) // ranks)
    hands: list[list[PackedRow]] = [[] for _ in range(ranks)]
    spent = [0.0] * ranks
    for row in sorted(rows, key=lambda row: -row.cost):
        rank = min((rank for rank in range(ranks) if len(hands[rank]) < most), key=lambda rank: spent[rank])
        hands[rank].append(row)
        spent[rank] += row.cost
    return [hand + [padding_row()] * (most - len(hand)) for hand in hands]
