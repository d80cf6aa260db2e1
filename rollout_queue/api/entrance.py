"""The outermost layer of the application: finds a request's route and checks its sender, once for all routes.

Requests of workers and learner go straight to their handlers, since four of them carry each group. The others, which
people and monitors send, continue to FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fastapi import Response
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.protocol import access, reasons, tracing
from slipstream.protocol.messages import ErrorBody
from slipstream.rollout_queue.api import requests
from slipstream.rollout_queue.api.access import Gate
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.ledger.records import Refusal

Handler = Callable[..., Awaitable[Response]]


class Entrance:
    """ASGI middleware.

    Args:
        app: Gets every request that is let in and has no handler here.
        gate: Decides who is let in.
        broker: Passed to the handlers.
        handlers: Take the request, the broker, and the name in the path where there is one.
    """

    def __init__(self, app: ASGIApp, gate: Gate, broker: Broker, handlers: Mapping[access.Route, Handler]) -> None:
        self._app = app
        self._gate = gate
        self._broker = broker
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        routes, name = access.find(path)
        route = access.route_for(method, routes)
        response: Response
        try:
            self._gate.check(route, f"{method} {path[:200]}", scope["headers"], method in ("GET", "HEAD"))
            if route is None and routes:
                response = _not_allowed(method, path, routes)
            elif route is None or (handle := self._handlers.get(route)) is None:
                # The server sends no body in answer to HEAD.
                await self._app({**scope, "method": "GET"} if method == "HEAD" else scope, receive, send)
                return
            else:
                self._broker.check_ready()
                with tracing.serving(f"{method} {route.path}", scope["headers"]) as span:
                    response = await self._answer(handle, Request(scope, receive), name)
                    span.set(http_status=response.status_code)
        except Refusal as refusal:
            response = requests.error_response(refusal)
        except ClientDisconnect:
            response = Response(status_code=400)  # nobody is there to read it
        except asyncio.CancelledError:
            if not self._broker.closing:
                raise
            response = requests.error_response(Refusal(reasons.NOT_READY, "the queue ends: try again in a moment", 1.0))
        await response(scope, receive, send)

    async def _answer(self, handle: Handler, request: Request, name: str) -> Response:
        try:
            return await (handle(request, self._broker, name) if name else handle(request, self._broker))
        except Refusal as refusal:
            return await requests.refusal_response(self._broker, refusal)


def _not_allowed(method: str, path: str, routes: Mapping[str, access.Route]) -> Response:
    allowed = sorted({*routes, *(["HEAD"] if "GET" in routes else [])})
    text = f"{method} {path[:200]} is not a request of the queue's: it takes {', '.join(allowed)} there"
    return requests.error(405, ErrorBody(reasons.http(405), text), {"Allow": ", ".join(allowed)})
