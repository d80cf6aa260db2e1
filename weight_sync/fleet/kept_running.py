"""Keeps one server's task going, whatever ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from protocol.client import QueueError
from weight_sync.fleet.member import Member

logger = logging.getLogger(__name__)

# After a failure of the queue, which concerns all servers.
QUEUE_PAUSE_S = 1.0
# Failures in a row that nobody foresaw, of one server's task, after which it is a bug that ends the learner.
MOST_BUGS = 6
BUG_PAUSE_S = 2.0


class FleetBroken(RuntimeError):
    """A server's task failed again and again in a way that nobody foresaw."""


async def kept_running(
    member: Member, troubled: Callable[[QueueError], None], on_failure: Callable[[BaseException], None]
) -> None:
    """A bug in one server's task holds up no other; one that comes back at once, again and again, ends the learner:
    a run whose only server is not brought up to date would stand still, and nobody would know why."""
    bugs = 0
    while True:
        began = time.monotonic()
        try:
            await member.run()
        except QueueError as error:
            troubled(error)
            pause_s = QUEUE_PAUSE_S
        except Exception as error:
            bugs = bugs + 1 if time.monotonic() - began < 60 else 1
            logger.exception("%s cannot be brought up to date (failure %d)", member.name, bugs)
            if bugs == MOST_BUGS:
                failure = FleetBroken(
                    f"{member.name} could not be brought up to date {bugs} times in a row; the last time: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                on_failure(failure)
                return
            pause_s = BUG_PAUSE_S * 2**bugs
        await asyncio.sleep(pause_s)
