"""Adds Slipstream's routes and rules to vLLM's API process: keeps the pause of a publication as a lease, closes the
routes of vLLM that a run does not need, and fails every request at once when the engine must not generate any more.

`--middleware slipstream.weight_sync.vllm.middleware.Slipstream` adds it. Its routes are `/slipstream/*`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.protocol.engine import EngineState, to_json
from slipstream.protocol.log_lines import Repeated
from slipstream.weight_sync.transports.http import chunks
from slipstream.weight_sync.vllm import engine_state, guard
from slipstream.weight_sync.vllm.chunk_route import serve_chunks
from slipstream.weight_sync.vllm.control_rules import RULES, Call
from slipstream.weight_sync.vllm.engine.contract import EngineClient
from slipstream.weight_sync.vllm.engine_state import EngineStatus, RouteError, how_it_died, status_of, watch
from slipstream.weight_sync.vllm.engines import ask_states
from slipstream.weight_sync.vllm.routes import ROUTES

logger = logging.getLogger(__name__)

PREFIX = "/slipstream/"
MAX_BODY_BYTES = 16 << 20


class _EndOnce(logging.Filter):
    """Lets vLLM tell the engine's end once.

    It logs a traceback for each request that fails by it, each longer than the one before: 18 MB for 128 requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if type(error).__name__ != "EngineDeadError":
            return True
        told, self._told = self._told, True
        return not told


class Slipstream:
    """ASGI middleware. `app.state.engine_client`, as vLLM sets it, is the engine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        once = _EndOnce()
        for handler in logging.getLogger("vllm").handlers:
            handler.addFilter(once)
        for name in ("vllm", "uvicorn", "uvicorn.error"):
            for handler in logging.getLogger(name).handlers:
                handler.addFilter(Repeated(handler))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            _log_cause_of_end(scope)
            return
        engine = _engine_of(scope)
        if engine is None:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # a run needs none of vLLM's
            return
        try:
            await self._route(engine, status_of(engine), scope, receive, send)
        except RouteError as error:
            await problem(error.status, error.message)(scope, receive, send)

    async def _route(
        self, engine: EngineClient, status: EngineStatus, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if status.heartbeat is None:
            status.scale_out = _generates(scope)
            status.heartbeat = asyncio.create_task(watch(engine, status, ask_states))
        engine_state.check_owner(status.owner, scope)
        path = guard.route_of(scope)
        if scope["path"].startswith(chunks.CHUNKS_PREFIX):
            await serve_chunks(scope, send)
        elif scope["path"].startswith(PREFIX):
            await respond(_answered(engine, scope, receive), scope, receive, send)
        elif path not in guard.OPEN_ROUTES:
            raise RouteError(403, f"{scope['method']} {path[:200]} {guard.CLOSED}")
        elif status.broken is not None:
            raise RouteError(503, status.broken)
        elif (rule := RULES.get((scope["method"], path))) is not None:
            await rule(Call(engine, status, self._app, scope, receive, send))
        else:
            await self._pass_unless_broken(status, scope, receive, send)

    async def _pass_unless_broken(self, status: EngineStatus, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        status.running.add(task)
        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if status.broken is None:
                raise
            if begun:
                raise ConnectionAbortedError(status.broken) from None
            raise RouteError(503, status.broken) from None
        finally:
            status.running.discard(task)


def _engine_of(scope: Scope) -> Any:
    return getattr(scope["app"].state, "engine_client", None) if "app" in scope else None


def _generates(scope: Scope) -> bool:
    """Return whether vLLM's routes for token ids are open (vllm 0.32, `register_scale_out_api_routers`)."""
    arguments = getattr(scope["app"].state, "args", None)
    return bool(getattr(arguments, "enable_scale_out", False) or getattr(arguments, "tokens_only", False))


def _log_cause_of_end(scope: Scope) -> None:
    """Log the cause when the server ends because of its engine: vLLM logs only the requests that failed by it."""
    engine = _engine_of(scope)
    if engine is not None and status_of(engine).broken is None and (why := how_it_died(engine)) is not None:
        logger.error("this server ends: %s", why)


async def respond(work: Awaitable[msgspec.Struct], scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the message that a route of Slipstream returns, or with its error."""
    try:
        answer = await work
        status = 503 if isinstance(answer, EngineState) and answer.reason else 200
        await JSONResponse(to_json(answer), status)(scope, receive, send)
    except RouteError as error:
        await problem(error.status, error.message)(scope, receive, send)
    except Exception as error:
        logger.exception("%s failed", scope["path"])
        await problem(500, f"{type(error).__name__}: {error}")(scope, receive, send)


async def _answered(engine: EngineClient, scope: Scope, receive: Receive) -> msgspec.Struct:
    handler = ROUTES.get((scope["method"], scope["path"]))
    if handler is None:
        raise RouteError(404, f"{scope['method']} {scope['path']} is not a route of Slipstream")
    return await handler(engine, await body_of(receive))


async def bytes_of(receive: Receive) -> bytes:
    """Read the whole body. Raises `RouteError` if it is larger than `MAX_BODY_BYTES`."""
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RouteError(400, "the client went away before its request was whole")
        whole += message.get("body", b"")
        if len(whole) > MAX_BODY_BYTES:
            raise RouteError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return bytes(whole)


async def body_of(receive: Receive) -> dict[str, Any]:
    """Read the body as a JSON object, {} if it is empty. Raises `RouteError` 400."""
    whole = await bytes_of(receive)
    try:
        body = json.loads(whole) if whole else {}
    except ValueError as error:
        raise RouteError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RouteError(400, "the body is not a JSON object")
    return body


def problem(status: int, message: str) -> JSONResponse:
    """Make the answer of a refusal, in the format of vLLM's errors."""
    kinds = {503: "ServiceUnavailable", 409: "Conflict", 400: "BadRequest"}
    kind = kinds.get(status, "SlipstreamError")
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
