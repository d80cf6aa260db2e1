"""Decides whether a server lags too far behind, and how long to wait before another try. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.protocol.messages import ServerState

RETRY_PAUSE_S = 2.0
MAX_PAUSE_S = 60.0

# Seconds for which a server that is behind is not stale: it may only be a moment slower than the one ahead.
MIN_GRACE_S = 0.2

# A server is slow from this many seconds of an engine step on, which a look at it does not outlast; and no longer from
# half of that on.
SLOW_STEP_S = 4.0

# An engine that is in a step does not answer: how many of its longest steps lately it may be silent before it counts as
# down.
SILENT_STEPS = 3.0


def patience_s(least_s: float, step_s: float, steps: float = 1.0) -> float:
    """Return how long to wait for an engine whose longest step lately took `step_s` seconds: `steps` of these, and at
    least `least_s`."""
    return max(least_s, steps * step_s)


def is_slow(step_s: float, was: bool) -> bool:
    """Return whether a server is slow. `was`: whether it was at the last look, lest it change with each step."""
    return step_s >= (SLOW_STEP_S / 2 if was else SLOW_STEP_S)


@dataclass(frozen=True)
class Standing:
    """The progress of one server, to compare servers by.

    Attributes:
        version: The version that it serves, None before the first.
        took_s: Seconds that the publication of `version` took.
    """

    name: str
    state: ServerState
    version: int | None
    took_s: float = 0.0


@dataclass(frozen=True)
class Lag:
    """How far a server is behind. It is stale when it is `too_far` behind for `grace_s` seconds.

    Attributes:
        versions: Versions between the server's and the newest.
        ahead: Name of the server with the newest version that serves.
    """

    versions: int
    ahead: str
    grace_s: float
    too_far: bool


def find_lag(server: Standing, others: Iterable[Standing], newest: int, max_staleness: int) -> Lag | None:
    """Compare a serving server with the others that serve. Returns None where none of them is ahead.

    A server that is max(1, `max_staleness`) versions behind `newest` would hold up the admission of tickets. Its grace
    period is twice what the publication to the server ahead took: leaving service aborts its requests, which a delay
    of milliseconds does not justify.

    Args:
        newest: The newest version that the learner has handed over.
    """
    if server.state is not ServerState.SERVING or server.version is None:
        return None
    serving = [of for of in others if of.state is ServerState.SERVING and of.version is not None]
    ahead = max(serving, key=lambda of: of.version or 0, default=None)
    if ahead is None or ahead.version is None or ahead.version <= server.version:
        return None
    versions = max(newest, ahead.version) - server.version
    grace_s = max(MIN_GRACE_S, 2 * ahead.took_s)
    return Lag(versions, ahead.name, grace_s, versions >= max(1, max_staleness))


def retry_pause_s(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row: doubled by each, at most `MAX_PAUSE_S`."""
    return min(MAX_PAUSE_S, RETRY_PAUSE_S * 2.0 ** max(0, min(failures, 30) - 1))
