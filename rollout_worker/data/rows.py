"""Finds the row of a ticket's running index: the same row on every worker, in whatever order tickets come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

# Number of rows that a stream keeps. The indices of open tickets are never so far apart, even in the deepest queue.
KEPT_ROWS = 4096

# Fields of messages and calls whose own fields are known.
_NESTED = ("content", "tool_calls", "function", "function_call")

# Rows of a table that are read at once where many are needed.
_BATCH = 1000


def without_none(columns: Any, deep: bool) -> Any:
    """Return a row's columns without each None that stands for a missing key of a message, its parts or its calls.

    Files and Arrow tables fill up messages that differ in their keys. `deep`: in arguments of calls too, where an Arrow
    table cannot tell None from a missing key.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"it is a {type(columns).__name__}, not a mapping of columns")
    prompt = columns.get("prompt")
    if not isinstance(prompt, list) or not any(_has_none(message, deep) for message in prompt):
        return columns
    return {**columns, "prompt": [_without_none(message, deep) for message in prompt]}


def _has_none(value: Any, deep: bool) -> bool:
    if isinstance(value, Mapping):
        return any(
            entry is None or (not _is_data(key, entry, deep) and _has_none(entry, deep)) for key, entry in value.items()
        )
    return isinstance(value, list) and any(_has_none(entry, deep) for entry in value)


def _without_none(value: Any, deep: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            key: entry if _is_data(key, entry, deep) else _without_none(entry, deep)
            for key, entry in value.items()
            if entry is not None
        }
    return [_without_none(entry, deep) for entry in value] if isinstance(value, list) else value


def _is_data(key: Any, entry: Any, deep: bool) -> bool:
    """Return whether an entry, such as a call's arguments or a tool's result, may hold None on purpose."""
    return not deep and (key not in _NESTED or (key == "content" and isinstance(entry, Mapping)))


class Row(NamedTuple):
    """A row of the data set, the epoch that it is drawn in, and its place in the data set."""

    epoch: int
    number: int
    columns: Mapping[str, Any]


class RowPosition(NamedTuple):
    """The position of a row: its epoch, and its number in the data set."""

    epoch: int
    number: int


class Rows(Protocol):
    """The rows of a data set.

    Attributes:
        size: Rows of one epoch; None while it is not known.
        by_number: Whether rows can be read by number, in any order.
    """

    @property
    def size(self) -> int | None: ...

    @property
    def by_number(self) -> bool: ...

    def __hash__(self) -> int: ...

    def place_of(self, index: int, seed: int, shuffle: bool) -> RowPosition:
        """Return the position of a ticket's running `index`; for a stream of unknown size as if its epoch did not
        end."""
        ...

    def row_for(self, index: int, seed: int, shuffle: bool) -> Row:
        """Return the row of a ticket's running `index`. Errors of the data set propagate."""
        ...

    def sample(self, most: int) -> Iterator[tuple[int, Any]]:
        """Yield at most `most` rows of one epoch in order, each with its number.

        An error stands for a row that cannot be read. The rows of a table are spread over it, with the first and the
        last; of a stream they are the first.
        """
        ...

    def column(self, name: str) -> Sequence[Any]:
        """Return a column of all rows, if `by_number`. Raises `KeyError` with the number of the first row that lacks
        it."""
        ...


class Table:
    """Rows that can be read by number. With `shuffle` each epoch has its own order."""

    by_number = True

    def __init__(self, rows: Any, from_arrow: bool = False) -> None:
        self.size: int = len(rows)
        self._rows = rows
        self._from_arrow = from_arrow

    def place_of(self, index: int, seed: int, shuffle: bool) -> RowPosition:
        epoch, position = divmod(index, self.size)
        return RowPosition(epoch, int(_permutation(self.size, seed, epoch)[position]) if shuffle else position)

    def row_for(self, index: int, seed: int, shuffle: bool) -> Row:
        place = self.place_of(index, seed, shuffle)
        return Row(place.epoch, place.number, self._read(place.number))

    def sample(self, most: int) -> Iterator[tuple[int, Any]]:
        numbers = spread(self.size, most)
        for start in range(0, len(numbers), _BATCH):
            batch = numbers[start : start + _BATCH]
            try:
                yield from self._read_batch(batch)
            except _Broken:
                for number in batch:
                    try:
                        yield number, self._read(number)
                    except (Exception, SystemExit) as error:  # the data set is the user's
                        yield number, error

    def column(self, name: str) -> Sequence[Any]:
        if name in (getattr(self._rows, "column_names", None) or ()):  # a data set of `datasets`, read by columns
            return list(self._rows[name])
        values = []
        for number in range(self.size):
            row = self._rows[number]
            if name not in row:
                raise KeyError(number)
            values.append(row[name])
        return values

    def _read_batch(self, numbers: list[int]) -> list[tuple[int, Any]]:
        """Read several rows at once where the data set can: six times as fast for Arrow tables. Raises `_Broken`."""
        if not hasattr(self._rows, "__getitems__"):
            raise _Broken
        try:
            rows = self._rows.__getitems__(numbers)
            return [(number, self._plain(row)) for number, row in zip(numbers, rows, strict=True)]
        except (Exception, SystemExit) as error:
            raise _Broken from error

    def _read(self, number: int) -> Any:
        return self._plain(self._rows[number])

    def _plain(self, row: Any) -> Any:
        return without_none(row, deep=self._from_arrow)


class Stream:
    """Rows that can only be read one after another, in their own order; each epoch is one iteration.

    A row whose place is behind, and not among the last `keep`, has the epoch iterated again from its start. Safe to be
    read from several threads. `begin(epoch)` starts an iteration; each must give the same rows on every worker.
    `skip(number)`, if given, starts one of the first epoch at that row, for a worker that comes late.
    """

    size: int | None = None
    by_number = False

    def __init__(
        self,
        begin: Callable[[int], Iterator[Any]],
        from_arrow: bool = False,
        keep: int = KEPT_ROWS,
        skip: Callable[[int], Iterator[Any]] | None = None,
    ) -> None:
        self._begin = begin
        self._skip = skip
        self._skipped = 0
        self._from_arrow = from_arrow
        self._keep = keep
        self._kept: dict[RowPosition, Any] = {}
        self._iterator: Iterator[Any] | None = None
        self._next = RowPosition(0, 0)
        self._lock = threading.Lock()

    def place_of(self, index: int, seed: int, shuffle: bool) -> RowPosition:
        size = self.size
        return RowPosition(0, index) if size is None else RowPosition(*divmod(index, size))

    def row_for(self, index: int, seed: int, shuffle: bool) -> Row:
        with self._lock:
            while True:
                place = self.place_of(index, seed, shuffle)
                try:
                    return Row(place.epoch, place.number, self._read(place))
                except _Ended:
                    if self.size is None:
                        raise ValueError("the data set gives no row at all") from None
                    # The size is known now, and the index belongs to a later epoch.

    def sample(self, most: int) -> Iterator[tuple[int, Any]]:
        for number in range(most):
            try:
                with self._lock:
                    row = self._read(RowPosition(0, number))
            except _Ended:
                return
            except (Exception, SystemExit) as error:  # the data set is the user's
                yield number, error
                return
            yield number, row

    def column(self, name: str) -> Sequence[Any]:
        raise TypeError("the rows of an iterable are read one after another")

    def _read(self, place: RowPosition) -> Any:
        """Read one row. Raises `_Ended` if the first epoch ends before it."""
        if place in self._kept:
            return self._kept[place]
        if self._iterator is None or self._next.epoch != place.epoch or self._next > place:
            self._go_to(RowPosition(place.epoch, 0))
        # Keep as many rows before it as tickets may lag behind.
        near = RowPosition(place.epoch, place.number - self._keep // 4)
        if self._skip is not None and place.epoch == 0 and self._next.number + self._keep < near.number:
            self._go_to(near)
        while self._next <= place:
            try:
                row = self._advance()
            except _PastTheEnd:
                self._skip = None  # The end of the epoch must be found row by row.
                self._go_to(RowPosition(0, 0))
                continue
            self._kept[self._next] = row
            while len(self._kept) > self._keep:
                del self._kept[next(iter(self._kept))]
            self._next = RowPosition(self._next.epoch, self._next.number + 1)
        return row

    def _go_to(self, place: RowPosition) -> None:
        self._iterator, self._next, self._skipped = None, place, 0
        if place.number and self._skip is not None:
            self._iterator, self._skipped = self._skip(place.number), place.number
        else:
            self._iterator = self._begin(place.epoch)

    def _advance(self) -> Any:
        assert self._iterator is not None
        try:
            return without_none(next(self._iterator), deep=self._from_arrow)
        except StopIteration:
            self._iterator = None
            epoch, count = self._next
            if self._skipped and count == self._skipped:
                raise _PastTheEnd from None
            if self.size is None:
                self.size = count or None
                raise _Ended from None
            raise ValueError(
                f"the data set gave {self.size} rows in its first epoch and {count} in epoch {epoch}: each iteration "
                f"must give as many"
            ) from None
        except BaseException:
            self._iterator = None  # a generator that raised gives no more
            raise


class _Ended(Exception):
    """The first epoch has ended."""


class _PastTheEnd(Exception):
    """No row follows those that were skipped."""


class _Broken(Exception):
    """A batch cannot be read; single rows of it may be readable."""


def spread(size: int, most: int) -> list[int]:
    """Return at most `most` numbers of range(size) at equal distances, with the first and the last."""
    if size <= most or most < 2:
        return list(range(min(size, most)))
    return [round(place * (size - 1) / (most - 1)) for place in range(most)]


def permutation(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of one epoch, int64 `[rows]`. PCG64 gives the same on every machine."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)


_permutation = lru_cache(maxsize=4)(permutation)
