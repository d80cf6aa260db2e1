"""What is decided about a server that is brought up to date. Pure: no I/O, and time comes in as an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.messages import ServerState

RETRY_PAUSE_S = 2.0

LONGEST_PAUSE_S = 60.0

# A server that is a version behind is not stale while it may only be a moment slower than the one that is ahead.
LEAST_GRACE_S = 0.2


@dataclass(frozen=True)
class Standing:
    """A server as the others are measured by it: `version` it serves, and the seconds that the publication of it
    took."""

    name: str
    state: ServerState
    version: int | None
    took_s: float = 0.0


@dataclass(frozen=True)
class Behind:
    """`versions` by which a server is behind the newest; `ahead`: the server that is closest to it. Where that is
    `too_far`, and it has been behind for `grace_s` seconds, it is stale."""

    versions: int
    ahead: str
    grace_s: float
    too_far: bool


def behind(server: Standing, others: Iterable[Standing], newest: int, max_staleness: int) -> Behind | None:
    """Whether a serving server is behind another serving one. max(1, K) versions or more behind the `newest` that the
    learner has handed over, it would hold admission.

    It has as long again as the other one took, twice, before it leaves service: its requests would be given up for the
    sake of milliseconds.
    """
    if server.state is not ServerState.SERVING or server.version is None:
        return None
    serving = [of for of in others if of.state is ServerState.SERVING and of.version is not None]
    ahead = max(serving, key=lambda of: of.version or 0, default=None)
    if ahead is None or ahead.version is None or ahead.version <= server.version:
        return None
    versions = max(newest, ahead.version) - server.version
    grace_s = max(LEAST_GRACE_S, 2 * ahead.took_s)
    return Behind(versions, ahead.name, grace_s, versions >= max(1, max_staleness))


def retry_pause_s(failures: int) -> float:
    """The pause after so many failures in a row; it doubles with each, up to a minute."""
    return min(LONGEST_PAUSE_S, RETRY_PAUSE_S * 2.0 ** max(0, min(failures, 30) - 1))
