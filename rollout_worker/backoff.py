"""How long to wait before something that failed is tried again."""

from __future__ import annotations

_FIRST_S, _MAX_WAIT_S = 0.25, 10.0
_MAX_DOUBLINGS = 10


def pause_s(pauses: int) -> float:
    """Seconds of the next pause after so many: 0.25, and twice as long each time, up to 10."""
    return min(_MAX_WAIT_S, _FIRST_S * 2.0 ** min(pauses, _MAX_DOUBLINGS))
