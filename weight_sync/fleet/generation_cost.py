"""Measures what publications take from a server's generation, by its tokens/s during them and between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Publications over which the rates are taken, how many it needs, and seconds between them in all: a count is exact to
# the tokens of one engine step.
NEWEST = 16
LEAST, LEAST_BETWEEN_S = 4, 4.0


@dataclass(frozen=True)
class TokenCount:
    """How many tokens the process `boot` of a server had sampled at the time `at`, seconds (`time.monotonic`)."""

    boot: str
    at: float
    generated: int


@dataclass(frozen=True)
class _Rate:
    seconds: float = 0.0
    tokens: int = 0

    def __add__(self, other: _Rate) -> _Rate:
        return _Rate(self.seconds + other.seconds, self.tokens + other.tokens)


class GenerationCost:
    """Compares the tokens/s of one server during its newest publications with those between them."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[_Rate, _Rate]] = deque(maxlen=NEWEST)
        self._ended: TokenCount | None = None

    def publication_failed(self) -> None:
        """Leave out the time from the publication before to the next one."""
        self._ended = None

    def published(self, began: TokenCount, ended: TokenCount) -> None:
        """Add a publication."""
        before, self._ended = self._ended, ended
        if before is not None and before.boot == began.boot == ended.boot:
            self._pairs.append((_rate(before, began), _rate(began, ended)))

    @property
    def share(self) -> float | None:
        """Share of the tokens that the server would sample without publications, 0 to 1; None while it is unknown."""
        between = sum((pair[0] for pair in self._pairs), _Rate())
        during = sum((pair[1] for pair in self._pairs), _Rate())
        if len(self._pairs) < LEAST or between.seconds < LEAST_BETWEEN_S or not between.tokens:
            return None
        both = between + during
        return max(0.0, 1 - both.tokens / both.seconds / (between.tokens / between.seconds))


def _rate(since: TokenCount, until: TokenCount) -> _Rate:
    return _Rate(until.at - since.at, until.generated - since.generated)
