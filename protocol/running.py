"""Statistics of values that come one by one, none of which is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Running:
    """Count, mean, sample deviation (Welford 1962) and extremes of values; all but the count None while there are none.

    Attributes:
        count: How many values were added.
    """

    count: int = 0
    _total: float = 0.0
    _squares: float = 0.0
    _min: float = math.inf
    _max: float = -math.inf

    def add(self, value: float) -> None:
        """Add a value."""
        before = self._total / self.count if self.count else value
        self.count += 1
        self._total += value
        self._squares += (value - before) * (value - self._total / self.count)
        self._min, self._max = min(self._min, value), max(self._max, value)

    def include(self, other: Running) -> None:
        """Add all values of another (Chan, Golub and LeVeque 1979)."""
        if self.count and other.count:
            distance = other._total / other.count - self._total / self.count
            self._squares += distance * distance * self.count * other.count / (self.count + other.count)
        self._squares += other._squares
        self.count += other.count
        self._total += other._total
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)

    @property
    def mean(self) -> float | None:
        return self._total / self.count if self.count else None

    @property
    def std(self) -> float | None:
        """The sample's standard deviation; None of fewer than two values."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else None

    @property
    def min(self) -> float | None:
        return self._min if self.count else None

    @property
    def max(self) -> float | None:
        return self._max if self.count else None
