"""HTTP around the routes: bodies in, bodies out, bearer token, and one shape for every refusal."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol import codec, routes
from protocol.client import JSON
from protocol.messages import Problem
from rollout_queue.ledger.refusal import Refusal

MAX_CONTROL_BYTES = 8 * 1024**2


class TooLarge(Exception):
    """A body beyond its limit; the text names both."""


def reply_json(message: Any) -> Response:
    return Response(codec.encode_json(message), media_type=JSON)


def refuse(refusal: Refusal) -> Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = f"{refusal.retry_after_s:g}"
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    problem = codec.encode_json(Problem(refusal.reason, refusal.message))
    return Response(problem, refusal.status, headers=headers, media_type=JSON)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes: refused by its declared length before it is read, or while it streams in.

    Raises `TooLarge`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise TooLarge(f"the body has {declared} bytes, allowed are {limit}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLarge(f"the body has more than the {limit} bytes that are allowed")
    return bytes(body)


async def read_json(request: Request, kind: Any) -> Any:
    """The control message in the body; raises `Refusal` (413, 422)."""
    try:
        return codec.decode_json(await read_body(request, MAX_CONTROL_BYTES), kind)
    except TooLarge as error:
        raise Refusal(413, "too_large", str(error)) from error
    except codec.DecodeError as error:
        raise Refusal(422, "decode", str(error)) from error


def answer_in_problems(app: FastAPI) -> None:
    """Give every refusal of `app` a `Problem` body."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return refuse(error)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return refuse(Refusal(error.status_code, f"http_{error.status_code}", message))


class BearerToken:
    """ASGI middleware: every route but the liveness probe wants the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != routes.HEALTH:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                message = "a bearer token is needed: set SLIPSTREAM_TOKEN to the queue's"
                await refuse(Refusal(401, "unauthorized", message))(scope, receive, send)
                return
        await self._app(scope, receive, send)
