"""The queue's clocks. Time in which the process itself did not run counts towards no deadline, and the time that people
read never goes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# The queue's loop reads the clock at least this often, seconds.
TICK_S = 0.25

# A longer time between two readings is one in which the process was stopped: SIGSTOP, a paused machine.
_MAX_GAP_S = 1.0


class AwakeClock:
    """Counts the seconds in which this process runs.

    A queue that was stopped has not read the heartbeats that came meanwhile, so their tickets and leases must not
    expire before it does. Some code has to read the clock every `TICK_S` seconds.

    Args:
        source: A monotonic clock, seconds.

    Attributes:
        overslept_s: Seconds that were left out so far.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._read_at = source()
        self.overslept_s = 0.0

    def __call__(self) -> float:
        now = self._source()
        gap = now - self._read_at
        self._read_at = now
        if gap > _MAX_GAP_S:
            self.overslept_s += gap - TICK_S
        return now - self.overslept_s


class WallClock:
    """Tells the time of day. Where the machine's clock is set back it goes on as if it had not been: else steps and
    events of a run would stand before earlier ones.

    Args:
        source: Time of day, seconds since 1970. `monotonic`: a monotonic clock, seconds.
    """

    def __init__(
        self, source: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._monotonic = monotonic
        self._ahead = source() - monotonic()

    def __call__(self) -> float:
        passed = self._monotonic()
        self._ahead = max(self._ahead, self._source() - passed)
        return passed + self._ahead

    def not_before(self, at: float) -> None:
        """Go on from `at`, seconds since 1970, if it is later than now."""
        self._ahead = max(self._ahead, at - self._monotonic())


@dataclass(frozen=True)
class Clock:
    """The queue's clocks, seconds: `monotonic` for deadlines, `wall` for times that people read."""

    monotonic: Callable[[], float] = field(default_factory=AwakeClock)
    wall: Callable[[], float] = field(default_factory=WallClock)

    def not_before(self, at: float) -> None:
        """Let `wall` go on from `at` if that is later than now."""
        if isinstance(self.wall, WallClock):
            self.wall.not_before(at)
