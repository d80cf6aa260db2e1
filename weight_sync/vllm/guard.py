"""The token on every route of vLLM's server: `--middleware weight_sync.vllm.guard.RequireToken` (I8).

vLLM's `--api-key` leaves its weight-transfer routes open to anyone who can reach the port.
"""

from __future__ import annotations

import hmac
import os

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from weight_sync.transports.http import ranges

HEALTH = "/health"


class RequireToken:
    """ASGI middleware: 401 to a request without `Authorization: Bearer <SLIPSTREAM_TOKEN>`, except the health probe.

    If SLIPSTREAM_TOKEN is not set when the server starts, everything passes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        token = os.environ.get("SLIPSTREAM_TOKEN")
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._expected is None or scope["type"] == "lifespan" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(ranges.PREFIX):
            # Staged weights, for other servers: they bring the transfer's own secret, which is asked for there.
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            wrong = "the token is not the server's" if given else "a token is needed"
            message = f"{wrong}: set SLIPSTREAM_TOKEN to the server's"
            error = {"message": message, "type": "Unauthorized", "param": None, "code": 401}
            await JSONResponse({"error": error}, 401)(scope, receive, send)
