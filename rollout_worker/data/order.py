"""Finds the row of a ticket: by its index, the same on every worker, or the one that the queue chose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from slipstream.protocol.config import ConfigError, TaskSection
from slipstream.protocol.config.text import nearest
from slipstream.protocol.mix import Mix
from slipstream.rollout_worker.data.rows import Row, RowPosition, Rows, permutation

LEARNABLE, SHUFFLED = "learnable", "shuffled"


class RowOrder:
    """The order of the rows of one data set.

    Args:
        rows: The data set.
        order: As `task.order`.
        mix: As `task.mix`. `column`: as `task.mix_column`.

    Raises:
        ConfigError: The data set cannot be read in that order.
    """

    def __init__(self, rows: Rows, order: str, mix: Mapping[str, float], column: str) -> None:
        self._rows = rows
        self._order = order
        self._mix = Mix(mix) if mix else None
        if not rows.by_number and (mix or order == LEARNABLE):
            raise ConfigError(
                f"{_named(order, mix)}: the data set is an iterable, whose rows come one after another, and here they "
                f"are read by number; give a list, a datasets.Dataset or a file, or leave {_named(order, mix)} out"
            )
        self._numbers = _numbers_of_parts(rows, mix, column) if mix else {}
        self._all = np.concatenate([*self._numbers.values()]) if mix else None
        self._permutation = lru_cache(maxsize=4 * len(mix))(permutation)

    @property
    def parts(self) -> dict[str, int]:
        """Number of rows of each part of `task.mix`, by name."""
        return {name: len(numbers) for name, numbers in self._numbers.items()}

    def place_of(self, index: int, seed: int, row: int | None = None) -> RowPosition:
        """Return the epoch of a ticket, and the number of its row in the data set.

        Args:
            index: Running index of the ticket.
            seed: The run's.
            row: The row that the queue chose, as `Ticket.row`.

        Raises:
            ValueError: The queue chose none, and has to.
        """
        if self._order != LEARNABLE and self._mix is None:
            return self._rows.place_of(index, seed, self._order == SHUFFLED)
        size = self._rows.size or 1
        if self._order == LEARNABLE:
            if row is None or row >= size:
                raise ValueError(
                    f'the ticket names row {row} of {size}: start the queue, too, with task.order = "learnable"'
                )
            return RowPosition(index // size, row if self._all is None else int(self._all[row]))
        assert self._mix is not None
        part, position = self._mix.place(index)
        numbers = self._numbers[part]
        epoch, place = divmod(position, len(numbers))
        if self._order == SHUFFLED:
            place = int(self._permutation(len(numbers), seed, epoch)[place])
        return RowPosition(index // size, int(numbers[place]))

    def row_for(self, index: int, seed: int, row: int | None = None) -> Row:
        """Return the row of a ticket. Args are those of `place_of`. Errors of the data set propagate."""
        if self._order != LEARNABLE and self._mix is None:
            return self._rows.row_for(index, seed, self._order == SHUFFLED)
        place = self.place_of(index, seed, row)
        return self._rows.row_for(place.number, seed, False)._replace(epoch=place.epoch)


def order_of(rows: Rows, settings: TaskSection) -> RowOrder:
    """Return the order that a run file asks for. The column of the parts is read once. Raises `ConfigError`."""
    return _order_of(rows, settings.order, tuple(sorted(settings.mix.items())), settings.mix_column)


def check_order(rows: Rows, settings: TaskSection, has_no_data: bool) -> None:
    """Check that rows can be read in the order that a run file asks for.

    Args:
        has_no_data: Whether the task has no data set.

    Raises:
        ConfigError: The text names the setting, the part or the row, and the remedy.
    """
    if has_no_data and (settings.mix or settings.order == LEARNABLE):
        name = _named(settings.order, settings.mix)
        raise ConfigError(
            f"{name}: the task has no data set, as its environment says what there is to do; give Task(dataset=...), "
            f"or leave {name} out"
        )
    order_of(rows, settings)


def _named(order: str, mix: Mapping[str, float]) -> str:
    return f'task.order = "{order}"' if order == LEARNABLE else f"task.mix = {dict(mix)}"


@lru_cache(maxsize=4)
def _order_of(rows: Rows, order: str, mix: tuple[tuple[str, float], ...], column: str) -> RowOrder:
    return RowOrder(rows, order, dict(mix), column)


def _numbers_of_parts(rows: Rows, shares: Mapping[str, float], column: str) -> dict[str, npt.NDArray[np.int64]]:
    """Return the numbers of the rows of each part, int64, in the order of the parts' names."""
    try:
        names = [str(value) for value in rows.column(column)]
    except KeyError as error:
        columns = ", ".join(sorted(str(name) for _, row in rows.sample(1) for name in row))
        raise ConfigError(
            f"task.mix_column = {column!r}: row {error.args[0]} has no such column, which task.mix needs to know the "
            f"part of each; the first row has {columns}: add it, or name another"
        ) from None
    except (Exception, SystemExit) as error:  # the data set is the user's
        raise ConfigError(
            f"task.mix_column = {column!r}: the column cannot be read: {type(error).__name__}: {error}; fix the data "
            f"set, or leave task.mix out"
        ) from error
    found: dict[str, list[int]] = {name: [] for name in sorted(shares)}
    for number, name in enumerate(names):
        if name not in found:
            raise ConfigError(
                f"task.mix: row {number} is of the part {name!r:.80}, and there are shares of {', '.join(found)} "
                f"alone; give it one, 0 to leave it out"
            )
        found[name].append(number)
    for name, numbers in found.items():
        if not numbers and shares[name]:
            close = nearest(name, {*names})
            hint = f"; did you mean {close}?" if close else ""
            raise ConfigError(
                f"task.mix: the part {name!r} has a share of {shares[name]:g} and no row has it in the column "
                f"{column!r}{hint}; leave it out, or name the rows"
            )
    return {name: np.array(numbers, dtype=np.int64) for name, numbers in found.items()}
