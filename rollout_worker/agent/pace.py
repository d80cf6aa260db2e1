"""Paces the requests of one episode, so that an agent that floods the endpoint holds up no other's."""

from __future__ import annotations

import asyncio
import math

from slipstream.rollout_worker.agent.api.messages import ApiError
from slipstream.rollout_worker.inference.failures import FailureNotices

# Requests of an episode that are handled as they come, and how many a second are beyond them. One costs the worker's
# loop about a millisecond, whatever it is answered.
_AT_ONCE, _PER_S = 1024, 100.0
# Requests that wait. Each holds a connection, of which a worker has 8,192.
_MAX_WAITING = 1024


class Pace:
    """The pace of one episode. Use it on one event loop."""

    def __init__(self, notices: FailureNotices) -> None:
        self._notices = notices
        self._due = -math.inf
        self._waiting = 0

    async def turn(self) -> None:
        """Wait until a request may be handled.

        Raises:
            ApiError: Too many wait already.
        """
        now = asyncio.get_running_loop().time()
        due = max(self._due, now - _AT_ONCE / _PER_S)
        if due > now and self._waiting >= _MAX_WAITING:
            text = f"{_MAX_WAITING} requests of this episode wait already: await their answers before asking again"
            raise ApiError(429, text, "too_many_requests")
        self._due = due + 1 / _PER_S
        if due <= now:
            return
        told = (
            f"an agent asks without end: of an episode's requests beyond {_AT_ONCE}, {_PER_S:g} a second are handled; "
            f"does it end on an error, such as turn_limit?"
        )
        self._notices.add("agent", "pace", told)
        self._waiting += 1
        try:
            await asyncio.sleep(due - now)
        finally:
            self._waiting -= 1
