"""What vLLM's own control routes may do on a server that publications use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weight_sync.vllm import lease
from weight_sync.vllm.engine_state import EngineStatus
from weight_sync.vllm.route import RouteError

# How long a resume waits for a swap that is under way.
SWAP_WITHIN_S = 5.0

Rule = Callable[[Any, EngineStatus, ASGIApp, Scope, Receive, Send], Awaitable[None]]


async def _status_of(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> int:
    """Pass the request on; the status that it was answered with."""
    status = 0

    async def noting(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        await send(message)

    await app(scope, receive, noting)
    return status


def _owner(scope: Scope) -> str | None:
    owner = dict(scope["headers"]).get(lease.OWNER_HEADER)
    return owner.decode("latin-1") if owner else None


async def pause(engine: Any, condition: EngineStatus, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """With the header `slipstream-owner` a lease; without it a person's, which only a person ends."""
    owner = _owner(scope)
    if owner is not None:
        lease.grant(engine, owner)
        await app(scope, receive, send)
    elif await _status_of(app, scope, receive, send) == 200:
        condition.persons_pause = True


async def resume(
    engine: Any, condition: EngineStatus, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    owner = _owner(scope)
    if condition.swapped is not None:
        await _end_of_swap(condition.swapped)
    if owner is None:
        condition.persons_pause = False
        if condition.lease_ends is not None:
            raise RouteError(
                409,
                f"{condition.lease_owner!r} is loading weights: generation goes on by itself when it has ended, and "
                f"nothing else needs to be done",
            )
    elif condition.lease_owner not in (None, owner):
        raise RouteError(409, f"{condition.lease_owner!r} holds the pause of this server")
    if not condition.whole:
        raise RouteError(409, "the model is half loaded: publish to this server again, or start it again")
    if owner is not None:
        lease.release(condition)
        if condition.persons_pause:
            raise RouteError(423, "a person paused this server: POST /resume, without an owner, ends it")
    await app(scope, receive, send)


async def health(
    engine: Any, condition: EngineStatus, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Within a swap it is not known whether the server goes on: that takes milliseconds."""
    if condition.swapped is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SWAP_WITHIN_S):
                await condition.swapped.wait()
    if condition.broken is not None:
        raise RouteError(503, condition.broken)
    await app(scope, receive, send)


async def _end_of_swap(swapped: asyncio.Event) -> None:
    """A swap takes milliseconds, and leaves a pause of before as it was: that is what is to be ended."""
    try:
        async with asyncio.timeout(SWAP_WITHIN_S):
            await swapped.wait()
    except TimeoutError:
        raise RouteError(
            409,
            f"new weights are being swapped in, for more than {SWAP_WITHIN_S:g} s: generation goes on by itself after "
            f"it, and nothing needs to be done; only a pause of your own stands until POST /resume is asked again",
        ) from None


def _stages(engine: Any) -> bool:
    """Whether this server's transport changes the model by our swap alone."""
    from weight_sync.transports.registry import TRANSPORTS, of_backend

    transfer = engine.vllm_config.weight_transfer_config
    name = of_backend(transfer.backend) if transfer is not None else None
    return name is not None and TRANSPORTS[name].stages


async def start_update(
    engine: Any, condition: EngineStatus, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """An in-place transport may touch the model from here on."""
    if not _stages(engine):
        condition.whole = False
    await app(scope, receive, send)


async def finish_update(
    engine: Any, condition: EngineStatus, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    if _stages(engine):
        raise RouteError(409, "this transport stages: the weights go live by POST /slipstream/swap")
    if await _status_of(app, scope, receive, send) == 200:
        condition.whole = True


async def label(engine: Any, condition: EngineStatus, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    raise RouteError(409, "weights are labelled when they go live: by POST /slipstream/swap or /finish_weight_update")


RULES: dict[tuple[str, str], Rule] = {
    ("GET", "/health"): health,
    ("POST", "/pause"): pause,
    ("POST", "/resume"): resume,
    ("POST", "/start_weight_update"): start_update,
    ("POST", "/finish_weight_update"): finish_update,
    ("POST", "/update_weight_version"): label,
}
