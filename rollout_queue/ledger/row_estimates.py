"""Estimates how much each row teaches, and chooses rows by it (`task.order = "learnable"`). Pure.

A group teaches by the differences of its rewards, so a row is worth the variance v of the rewards within its groups.
Where a reward is 1 with probability p, else 0, that is p(1 - p): nothing for rows that always or never succeed. It is
defined for rewards of any scale, and the choice is the same if all rewards are multiplied by a number. Of a row's last
n groups, at most `RECENT_GROUPS`, the mean variance is v, and V is the mean of v over all rows that were tried (1 while
that is 0). Then the row is drawn with a probability in proportion to

    w = (n v + V) / (n + 1)

which takes a row that was never tried for an average one. Pooling the rewards of several groups instead would make a
row that has gone from never to always look like the most useful one.

Every `PASS_EVERY`-th ticket comes from a pass through all rows, so that each row comes at least once in
`PASS_EVERY` x rows tickets, and a row that has become learnable is found. With `task.mix` each part is a data set of
its own.

The choice follows from the run's seed, the ticket's index and the estimates alone. These are stored with the groups
that changed them, and all sums are computed from them alone, so a queue that was killed chooses as it would have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import gcd, sqrt

import numpy as np
import numpy.typing as npt

from slipstream.protocol import reasons
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import Fingerprint
from slipstream.protocol.mix import Mix
from slipstream.protocol.status import RowsStatus
from slipstream.rollout_queue.ledger.records import Decision, Refusal, RowOutcome, RowRecord

# One ticket in so many is of the pass through all rows.
PASS_EVERY = 5

# The groups that an estimate remembers: more would be less noisy, but of a policy that has moved on.
RECENT_GROUPS = 8

# They take 1.2 GB.
MAX_ROWS = 10**8

# Rows whose weights are added up together: a draw costs the number of blocks, and of the rows in one.
_BLOCK = 1024

_BINS = 10

# Changes after which the status counts all rows again, as a share of them.
_RECOUNT_SHARE = 1e-4

# The golden ratio: steps of that part of a range fill it evenly.
_GOLDEN = (sqrt(5) - 1) / 2

_Floats = npt.NDArray[np.float64]


class RowEstimates:
    """The estimates of all rows: 12 bytes for each, and 32 for 1,024 of them.

    Rows count over the parts of `task.mix` in the order of their names. Of a data set of another size the estimates are
    kept by number.

    Args:
        config: Gives the seed and the mix.
        records: The estimates in the store.
        data: Data set of the session: its number of rows, and of each part; None while no worker has named one.
    """

    def __init__(self, config: RunConfig, records: Sequence[RowRecord], data: Fingerprint | None) -> None:
        self._seed = config.run.seed
        self._mix = Mix(config.task.mix) if config.task.mix else None
        self._table = _Table()
        self._table.make_room(1 + max((record.row for record in records), default=-1))
        for record in records:
            self._table.put(record)
        self._sizes: dict[str, int] = {}
        self._parts: dict[str, _Part] = {}
        self._starts: list[int] = []
        self._changes = 0
        self._status: RowsStatus | None = None
        self._divide(data)

    @property
    def is_ready(self) -> bool:
        """Whether a worker has named the data set, so that rows can be chosen."""
        return bool(self._parts)

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def check(self, worker_id: str, data: Fingerprint) -> None:
        """Refuse a worker whose data set no row can be chosen of (FINGERPRINT)."""
        why = ""
        if data.rows is None:
            why = 'its data set is an iterable, whose number of rows is not known; set task.order = "shuffled"'
        elif not 0 < data.rows <= MAX_ROWS:
            why = f'its data set has {data.rows} rows, the queue estimates 1 to {MAX_ROWS}; set task.order = "shuffled"'
        elif self._mix is not None:
            lacking = [name for name in self._mix.drawn if data.parts.get(name, 0) < 1]
            if lacking or sum(data.parts.values()) != data.rows:
                why = f"task.mix names {', '.join(self._mix.parts)}, its parts have {data.parts} of {data.rows} rows"
        if why:
            raise Refusal(reasons.FINGERPRINT, f'worker {worker_id} does not fit task.order = "learnable": {why}')

    def row_of(self, index: int, before: int | None = None) -> int:
        """Return the row of a ticket: the one that its index had `before`, if there is such a row still.

        Args:
            index: The ticket's running index.

        Raises:
            ValueError: `is_ready` is false.
        """
        if not self.is_ready:
            raise ValueError("no worker has named the data set yet")
        if before is not None and before < self.size:
            return before
        name, position = self._mix.place(index) if self._mix is not None else ("", index)
        part = self._parts[name]
        turn, others = divmod(position, PASS_EVERY)
        if not others:
            return part.start + _of_pass(turn, part.size, self._seed)
        return part.draw(np.random.Generator(np.random.PCG64([self._seed, index, 1])).random())

    def after(self, row: int, outcome: RowOutcome) -> RowRecord:
        """Return the estimate of a row once it has taken in the rewards of a group."""
        before = self.get(row)
        share = 1 / min(before.tried + 1, RECENT_GROUPS)
        mean = before.mean + share * (outcome.mean - before.mean)
        variance = before.spread**2 + share * (outcome.variance - before.spread**2)
        return RowRecord(row, before.tried + 1, _float32(mean), _float32(sqrt(max(0.0, variance))))

    def get(self, row: int) -> RowRecord:
        """Return the estimate of a row."""
        return self._table.get(row)

    def apply(self, decision: Decision) -> None:
        """Apply a decision."""
        for record in decision.rows:
            self._table.put(record)
            if record.row < self.size:
                # Of parts that begin with the same row all but the last are empty.
                [*self._parts.values()][bisect_right(self._starts, record.row) - 1].add_up(record.row)
        self._changes += len(decision.rows)
        if decision.run is not None:
            self._divide(decision.run.data)

    def status(self) -> RowsStatus | None:
        """Return how the rows went; None while their number is not known. Of many rows it may be slightly old."""
        if not self.is_ready:
            return None
        if self._status is None or self._changes > _RECOUNT_SHARE * self.size:
            self._status, self._changes = self._table.status(self.size), 0
        return self._status

    def _divide(self, data: Fingerprint | None) -> None:
        """Divide the rows into their parts, if the data set is another."""
        sizes = {} if data is None or data.rows is None else data.parts if self._mix is not None else {"": data.rows}
        if sizes == self._sizes:
            return
        self._sizes, self._status = dict(sorted(sizes.items())), None
        self._table.make_room(self.size)
        self._parts, start = {}, 0
        for name, size in self._sizes.items():
            self._parts[name] = _Part(self._table, start, size)
            start += size
        self._starts = [part.start for part in self._parts.values()]


class _Table:
    """The estimates by row."""

    def __init__(self) -> None:
        self.tried = np.zeros(0, np.uint32)
        self.mean = np.zeros(0, np.float32)
        self.spread = np.zeros(0, np.float32)

    def make_room(self, rows: int) -> None:
        if (missing := rows - len(self.tried)) > 0:
            self.tried = np.concatenate([self.tried, np.zeros(missing, np.uint32)])
            self.mean = np.concatenate([self.mean, np.zeros(missing, np.float32)])
            self.spread = np.concatenate([self.spread, np.zeros(missing, np.float32)])

    def put(self, record: RowRecord) -> None:
        self.make_room(record.row + 1)
        self.tried[record.row] = record.tried
        self.mean[record.row] = record.mean
        self.spread[record.row] = record.spread

    def get(self, row: int) -> RowRecord:
        if row >= len(self.tried):
            return RowRecord(row)
        return RowRecord(row, int(self.tried[row]), float(self.mean[row]), float(self.spread[row]))

    def status(self, size: int) -> RowsStatus:
        """Count the first `size` rows."""
        tried = self.tried[:size] > 0
        means, spreads = self.mean[:size][tried].astype(np.float64), self.spread[:size][tried]
        if not len(means):
            return RowsStatus(size)
        lowest, highest = float(means.min()), float(means.max())
        counts = np.histogram(means, _BINS, (lowest, highest))[0].tolist() if lowest < highest else [len(means)]
        return RowsStatus(size, len(means), int(np.count_nonzero(spreads)), lowest, highest, counts)


class _Part:
    """The rows of one part: a range of all rows."""

    def __init__(self, table: _Table, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self._table = table
        # By block: the sums of n v / (n + 1), of 1 / (n + 1), and of v and 1 over the rows that were tried.
        self._sums = np.zeros((-(-size // _BLOCK), 4))
        for block in range(len(self._sums)):
            self._sums[block] = self._summed(block)

    def add_up(self, row: int) -> None:
        """Add up the block of a row, which has changed."""
        block = (row - self.start) // _BLOCK
        self._sums[block] = self._summed(block)

    def draw(self, where: float) -> int:
        """Return the row whose weight stands at `where`, from 0 to 1, of the sum of all weights."""
        known, unknown, variance, tried = self._sums.T
        prior = float(variance.sum() / tried.sum()) if variance.any() else 1.0
        ends = np.cumsum(known + prior * unknown)
        at = where * ends[-1]
        block = min(int(np.searchsorted(ends, at, "right")), len(ends) - 1)
        at -= ends[block - 1] if block else 0.0
        known, unknown, _ = self._shares(block)
        ends = np.cumsum(known + prior * unknown)
        return self.start + block * _BLOCK + min(int(np.searchsorted(ends, at, "right")), len(ends) - 1)

    def _rows(self, block: int) -> slice:
        first = self.start + block * _BLOCK
        return slice(first, min(first + _BLOCK, self.start + self.size))

    def _shares(self, block: int) -> tuple[_Floats, _Floats, _Floats]:
        """Return n v / (n + 1), 1 / (n + 1) and v of each row of a block."""
        rows = self._rows(block)
        groups = np.minimum(self._table.tried[rows], RECENT_GROUPS).astype(np.float64)
        variance = np.square(self._table.spread[rows].astype(np.float64))
        return groups * variance / (groups + 1), 1 / (groups + 1), variance

    def _summed(self, block: int) -> _Floats:
        tried = np.count_nonzero(self._table.tried[self._rows(block)])
        return np.array([*(share.sum() for share in self._shares(block)), tried])


def _of_pass(turn: int, rows: int, seed: int) -> int:
    """Return the row of turn number `turn` of a pass that meets each row once in `rows` turns."""
    stride = max(1, round(_GOLDEN * rows))
    while gcd(stride, rows) != 1:
        stride += 1
    return (seed + turn * stride) % rows


def _float32(value: float) -> float:
    return float(np.float32(value))
