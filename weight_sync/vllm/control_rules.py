"""Rules for vLLM's own control routes, so that a pause always ends and nobody generates from half-loaded weights (I6).

The pause of an in-place transport is a lease, which ends by itself if its owner does not renew it: by resuming if the
live model is whole; else this server answers 503 and ends. Only the learner of the run that owns the server gets one
(`engine_state.check_owner`), and a person's `/resume` ends the lease of any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.protocol.engine import Lease
from slipstream.weight_sync.vllm.engine.contract import EngineClient
from slipstream.weight_sync.vllm.engine_state import LEASE_HEADER, EngineStatus, RouteError, status_of

logger = logging.getLogger(__name__)

# Lease from `/pause` to the first renewal.
FIRST_LEASE_S = 15.0
MAX_LEASE_S = 60.0
RESUME_TIMEOUT_S = 10.0

# How long a resume waits for a running swap.
SWAP_WITHIN_S = 5.0


async def renew_pause(engine: EngineClient, body: dict[str, Any]) -> Lease:
    """Renew a pause: `{"owner": str, "seconds": number}`. It ends in `seconds` at the earliest."""
    owner, seconds = body.get("owner"), body.get("seconds")
    if not isinstance(owner, str) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_LEASE_S:
        raise RouteError(400, f'a lease wants {{"owner": text, "seconds": above 0, at most {MAX_LEASE_S:g}}}')
    status = status_of(engine)
    if status.lease_owner != owner:
        raise RouteError(409, f"{owner!r} holds no pause here: it ended, or {status.lease_owner!r} holds it")
    _set(engine, status, owner, seconds)
    return Lease(owner, seconds)


def grant_pause(engine: EngineClient, owner: str) -> None:
    """Give `owner` the lease of a pause that it is about to begin.

    Raises:
        RouteError: Another holds one in the same run. That of an earlier run ends.
    """
    status = status_of(engine)
    if status.lease_owner not in (None, owner) and _is_of_owner(status):
        raise RouteError(409, f"{status.lease_owner!r} holds the pause of this server")
    status.lease_run = status.owner.run
    _set(engine, status, owner, FIRST_LEASE_S)


def _is_of_owner(status: EngineStatus) -> bool:
    """Return whether the lease was given to the run that owns the server now."""
    return status.lease_run == status.owner.live(time.monotonic()) != ""


def release_pause(status: EngineStatus) -> None:
    """End the lease, as its owner has ended the pause."""
    if status.lease_ends is not None:
        status.lease_ends.cancel()
    status.lease_owner = status.lease_ends = None


def _set(engine: EngineClient, status: EngineStatus, owner: str, seconds: float) -> None:
    release_pause(status)
    status.lease_owner = owner
    status.lease_ends = asyncio.get_running_loop().call_later(seconds, _over, engine, status)


def _over(engine: EngineClient, status: EngineStatus) -> None:
    owner = status.lease_owner
    release_pause(status)
    if not status.whole:
        status.break_down(f"{owner} left it half loaded, and did not come back before its lease ended")
    elif not status.user_pause:
        logger.warning("%s did not renew the lease of its pause: resuming", owner)
        status.ending = asyncio.ensure_future(_resume(engine, status, owner))


async def _resume(engine: EngineClient, status: EngineStatus, owner: str | None) -> None:
    try:
        async with asyncio.timeout(RESUME_TIMEOUT_S):
            await engine.resume_generation()
    except Exception as error:
        status.break_down(f"the pause of {owner} could not be ended: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Call:
    """A request to one of vLLM's control routes, which `app` answers."""

    engine: EngineClient
    status: EngineStatus
    app: ASGIApp
    scope: Scope
    receive: Receive
    send: Send

    @property
    def owner(self) -> str | None:
        """The lease that it is made under, None for a person's."""
        owner = dict(self.scope["headers"]).get(LEASE_HEADER)
        return owner.decode("latin-1") if owner else None

    async def pass_on(self) -> int:
        """Pass the request on. Returns the status of its answer."""
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await self.send(message)

        await self.app(self.scope, self.receive, noting)
        return status


Rule = Callable[[Call], Awaitable[None]]


async def pause(call: Call) -> None:
    """Pause under a lease with the header `slipstream-owner`; without it for a person, and only a person ends that."""
    owner = call.owner
    if owner is not None:
        grant_pause(call.engine, owner)
        await call.pass_on()
        return
    # Known as a person's before the engine stands still, which may take until its requests have ended.
    before, call.status.user_pause = call.status.user_pause, True
    answered = 0
    try:
        answered = await call.pass_on()
    finally:
        if answered != 200:
            call.status.user_pause = before


async def resume(call: Call) -> None:
    """Resume, unless the run's own learner holds the pause or the model is half loaded. For a person, whoever else
    holds it."""
    owner = call.owner
    if not await end_of_swap(call.status):
        raise RouteError(
            409,
            f"new weights are being swapped in, for more than {SWAP_WITHIN_S:g} s: generation continues after "
            f"it, and nothing needs to be done; only a pause of your own stands until POST /resume is asked again",
        )
    if owner is None:
        call.status.user_pause = False
        if call.status.lease_ends is not None and _is_of_owner(call.status):
            raise RouteError(
                409,
                f"{call.status.lease_owner!r} is loading weights: generation continues when it has ended, and "
                f"nothing else needs to be done",
            )
    elif call.status.lease_owner not in (None, owner):
        raise RouteError(409, f"{call.status.lease_owner!r} holds the pause of this server")
    if not call.status.whole:
        raise RouteError(409, "the model is half loaded: publish to this server again, or start it again")
    release_pause(call.status)
    if owner is not None and call.status.user_pause:
        raise RouteError(423, "a person paused this server: POST /resume, without an owner, ends it")
    await call.pass_on()


async def health(call: Call) -> None:
    """Answer after a running swap, which takes milliseconds and may break the server down."""
    await end_of_swap(call.status)
    if call.status.broken is not None:
        raise RouteError(503, call.status.broken)
    await call.pass_on()


async def end_of_swap(status: EngineStatus) -> bool:
    """Wait for a running swap, which takes milliseconds and leaves an earlier pause in force.

    Returns:
        False if it still runs after `SWAP_WITHIN_S`.
    """
    if status.swapped is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SWAP_WITHIN_S):
                await status.swapped.wait()
                return True
        return False
    return True


def _stages(engine: EngineClient) -> bool:
    """Return whether this server's transport changes the model by Slipstream's swap only."""
    from slipstream.weight_sync.transports.registry import TRANSPORTS, of_backend

    transfer = engine.vllm_config.weight_transfer_config
    name = of_backend(transfer.backend) if transfer is not None else None
    return name is not None and TRANSPORTS[name].stages


async def start_update(call: Call) -> None:
    """Open an update. From now on an in-place transport may touch the model."""
    if not _stages(call.engine):
        call.status.whole = False
    await call.pass_on()


async def finish_update(call: Call) -> None:
    """End the update of an in-place transport, after which the model is whole."""
    if _stages(call.engine):
        raise RouteError(409, "this transport stages: the weights go live by POST /slipstream/swap")
    if await call.pass_on() == 200:
        call.status.whole = True


async def label(call: Call) -> None:
    raise RouteError(409, "weights are labelled when they go live: by POST /slipstream/swap or /finish_weight_update")


RULES: dict[tuple[str, str], Rule] = {
    ("GET", "/health"): health,
    ("POST", "/pause"): pause,
    ("POST", "/resume"): resume,
    ("POST", "/start_weight_update"): start_update,
    ("POST", "/finish_weight_update"): finish_update,
    ("POST", "/update_weight_version"): label,
}
