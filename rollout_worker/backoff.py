"""Pauses before something that failed is tried again."""

from __future__ import annotations

_FIRST_S, _MAX_WAIT_S = 0.25, 10.0
_MAX_DOUBLINGS = 10


def pause_s(pauses: int) -> float:
    """Return the seconds of the next pause after `pauses` earlier ones: 0.25, doubled each time, at most 10."""
    return min(_MAX_WAIT_S, _FIRST_S * 2.0 ** min(pauses, _MAX_DOUBLINGS))
