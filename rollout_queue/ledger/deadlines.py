"""When what is out comes back by itself: a time-out that its holder renews, up to a greatest age.

Times are seconds of the caller's clock.
"""

from __future__ import annotations

import math


class Deadlines:
    """Of tickets or of leases, by their ids.

    timeout_s: after the start or the latest renewal; max_age_s: after the start, however often it was renewed.
    """

    def __init__(self, timeout_s: float, max_age_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._due: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    def start(self, name: str, now: float) -> None:
        """It is out from now on; one that was out already begins anew."""
        self._ends[name] = now + self._max_age_s
        self._due[name] = min(now + self._timeout_s, self._ends[name])

    def renew(self, name: str, now: float) -> None:
        """Its holder was heard from; nothing happens to one that is not out."""
        if name in self._due:
            self._due[name] = min(now + self._timeout_s, self._ends[name])

    def end(self, name: str) -> None:
        """It is out no more, if it was."""
        self._due.pop(name, None)
        self._ends.pop(name, None)

    def has_outlived(self, name: str, now: float) -> bool:
        """Whether one that is out has reached its greatest age; KeyError if it is not out."""
        return self._ends[name] <= now

    def expired(self, now: float) -> list[str]:
        """Those whose time is over and that are still out, in the order of their starts."""
        return [name for name, due in self._due.items() if due <= now]

    def soonest(self) -> float:
        """The first deadline; infinity where nothing is out."""
        return min(self._due.values(), default=math.inf)
