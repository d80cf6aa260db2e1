"""What a reward function notes beside its rewards: `log_metric(name, value)` and `log_extra(column, values)`.

Both may be called from any thread, and late: by a function that was given up, or by a thread that it left behind. Only
what was noted before `close` counts. Everything is bounded, and what goes beyond is left out with its reason.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from protocol.messages import LARGEST_FIGURE
from protocol.rollouts import is_counted
from rollout_worker.task.rewards.base import Values
from rollout_worker.user_code.texts import encodable

# Of one reward function and one group. The queue takes 256 figures a rollout, tools' counts among them.
MOST_METRICS = 32
MOST_COLUMNS = 16
MOST_REASONS = 4
NAME_CHARACTERS = 128
TEXT_CHARACTERS = 2000
_SHOWN_CHARACTERS = 60


class Notes:
    """The notes of one call over a batch of `size` rollouts. `log_metric` and `log_extra` are plain functions, so that
    a copy of the arguments still writes here."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._open = True
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[str]] = {}
        self._left_out: dict[str, None] = {}
        self.log_metric, self.log_extra = self._functions()

    def close(self) -> Values:
        """What was noted so far, as yet without rewards. A metric that was noted several times is averaged (TRL's)."""
        with self._lock:
            self._open = False
            values = Values([], left_out=list(self._left_out))
        for name, figures in self._metrics.items():
            values.metrics[name] = math.fsum(figure / len(figures) for figure in figures)
        for column, texts in self._columns.items():
            if len(texts) == self._size:
                values.extra[column] = texts
            else:
                values.left_out.append(
                    f"log_extra({column!r}, ...) had {len(texts)} values for {self._size} completions; give one each"
                )
        return values

    def _functions(self) -> tuple[Callable[[str, Any], None], Callable[[str, Sequence[Any]], None]]:
        def log_metric(name: str, value: float) -> None:
            """Note a figure of this batch; it is averaged over the step."""
            try:
                figure = float(value)
            except (TypeError, ValueError, OverflowError):
                figure = math.nan
            self._add_metric(_name(name), figure, value)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            """Note something about each completion, for a reader."""
            self._add_column(_name(column), [_text(value) for value in values])

        return log_metric, log_extra

    def _add_metric(self, name: str, value: float, given: object) -> None:
        shown = _text(repr(given)[:_SHOWN_CHARACTERS])
        with self._lock:
            if not self._open:
                return
            if is_counted(name):
                self._leave_out(f"log_metric({name!r}, ...): that name is Slipstream's own; choose another")
            elif not abs(value) <= LARGEST_FIGURE:
                self._leave_out(f"log_metric({name!r}, {shown}): give a finite number below {LARGEST_FIGURE:g}")
            elif name not in self._metrics and len(self._metrics) == MOST_METRICS:
                self._leave_out(f"log_metric({name!r}, ...): {MOST_METRICS} metrics are the most")
            else:
                self._metrics.setdefault(name, []).append(value)

    def _add_column(self, column: str, texts: list[str]) -> None:
        with self._lock:
            if not self._open:
                return
            if column not in self._columns and len(self._columns) == MOST_COLUMNS:
                self._leave_out(f"log_extra({column!r}, ...): {MOST_COLUMNS} columns are the most")
                return
            found = self._columns.setdefault(column, [])
            found += texts[: self._size + 1 - len(found)]  # one too many is enough to see that it is too many

    def _leave_out(self, reason: str) -> None:
        if len(self._left_out) < MOST_REASONS:
            self._left_out[reason] = None


def _name(name: object) -> str:
    return encodable(str(name)[:NAME_CHARACTERS])


def _text(value: object) -> str:
    """Called where the function runs, as the text of an object is the user's code too."""
    text = value if isinstance(value, str) else str(value)
    return encodable(text if len(text) <= TEXT_CHARACTERS else f"{text[: TEXT_CHARACTERS - 3]}...")
