"""The pause of an in-place transport as a lease: it ends by itself when its owner does not renew it (I6).

It ends by resuming where the live model is whole; else this server answers 503 and ends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from weight_sync.vllm.engine_state import EngineStatus, condition_of
from weight_sync.vllm.route import RouteError

logger = logging.getLogger(__name__)

OWNER_HEADER = b"slipstream-owner"
# From `/pause` to the first renewal.
FIRST_LEASE_S = 15.0
LONGEST_LEASE_S = 600.0
RESUME_TIMEOUT_S = 10.0


async def renew(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    """`{"owner", "seconds"}`: the pause that `owner` holds ends in `seconds` at the earliest."""
    owner, seconds = body.get("owner"), body.get("seconds")
    if not isinstance(owner, str) or not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_LEASE_S:
        raise RouteError(400, f'a lease wants {{"owner": text, "seconds": above 0, at most {LONGEST_LEASE_S:g}}}')
    condition = condition_of(engine)
    if condition.lease_owner != owner:
        raise RouteError(409, f"{owner!r} holds no pause here: it ended, or {condition.lease_owner!r} holds it")
    _set(engine, condition, owner, seconds)
    return {"owner": owner, "seconds": seconds}


def grant(engine: Any, owner: str, seconds: float = FIRST_LEASE_S) -> None:
    """`owner` is about to pause the engine. Raises `RouteError` where another holds the pause."""
    condition = condition_of(engine)
    if condition.lease_owner not in (None, owner):
        raise RouteError(409, f"{condition.lease_owner!r} holds the pause of this server")
    _set(engine, condition, owner, seconds)


def release(condition: EngineStatus) -> None:
    """The owner has ended its pause."""
    if condition.lease_ends is not None:
        condition.lease_ends.cancel()
    condition.lease_owner = condition.lease_ends = None


def _set(engine: Any, condition: EngineStatus, owner: str, seconds: float) -> None:
    release(condition)
    condition.lease_owner = owner
    condition.lease_ends = asyncio.get_running_loop().call_later(seconds, _over, engine, condition)


def _over(engine: Any, condition: EngineStatus) -> None:
    owner = condition.lease_owner
    release(condition)
    if not condition.whole:
        condition.break_down(f"{owner} left it half loaded, and did not come back before its lease ended")
    elif not condition.persons_pause:
        logger.warning("%s did not renew the lease of its pause: resuming", owner)
        condition.ending = asyncio.ensure_future(_resume(engine, condition, owner))


async def _resume(engine: Any, condition: EngineStatus, owner: str | None) -> None:
    try:
        async with asyncio.timeout(RESUME_TIMEOUT_S):
            await engine.resume_generation()
    except Exception as error:
        condition.break_down(f"the pause of {owner} could not be ended: {type(error).__name__}: {error}")
