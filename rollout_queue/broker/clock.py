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

# A step of the machine's clock that people are told of. Smaller ones are corrections.
_TOLD_STEP_S = 5.0


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
    """Tells the time of day. Where the machine's clock is set back it continues as if it had not been: else steps and
    events of a run would stand before earlier ones.

    Args:
        source: Time of day, seconds since 1970. `monotonic`: a monotonic clock, seconds.
    """

    def __init__(
        self, source: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._monotonic = monotonic
        self._ahead = self._machine_ahead = source() - monotonic()

    def __call__(self) -> float:
        passed = self._monotonic()
        self._ahead = max(self._ahead, self._source() - passed)
        return passed + self._ahead

    def find_step(self) -> float:
        """Return by how many seconds the machine's clock was set since the last call; 0 for less than a few."""
        ahead = self._source() - self._monotonic()
        step = ahead - self._machine_ahead
        self._machine_ahead = ahead
        return step if abs(step) >= _TOLD_STEP_S else 0.0

    def not_before(self, at: float) -> None:
        """Continue from `at`, seconds since 1970, if it is later than now."""
        self._ahead = max(self._ahead, at - self._monotonic())


@dataclass(frozen=True)
class Clock:
    """The queue's clocks, seconds: `monotonic` for deadlines, `wall` for times that people read."""

    monotonic: Callable[[], float] = field(default_factory=AwakeClock)
    wall: Callable[[], float] = field(default_factory=WallClock)

    def describe_step(self) -> str | None:
        """Describe a step of the machine's clock since the last call, for people; None if there was none."""
        step = self.wall.find_step() if isinstance(self.wall, WallClock) else 0.0
        if not step:
            return None
        if step > 0:
            follows = "times that are shown continue from there, and no deadline is changed"
        else:
            follows = "times that are shown continue as if it had not been, and no deadline is changed"
        at = time.strftime("%H:%M:%S", time.localtime(self.wall()))
        return (
            f"at {at} this machine's clock was set {'ahead' if step > 0 else 'back'} by {abs(step):,.0f} s: {follows}"
        )

    def not_before(self, at: float) -> None:
        """Let `wall` continue from `at` if that is later than now."""
        if isinstance(self.wall, WallClock):
            self.wall.not_before(at)
