"""vLLM's route `/collective_rpc` in front of what closes it on a run's server: `--middleware
tests.kit.collective_rpc.CollectiveRpc`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class CollectiveRpc:
    """ASGI middleware that calls a method of the workers, as vLLM's own route does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/collective_rpc":
            await self._app(scope, receive, send)
            return
        asked = await Request(scope, receive).json()
        engine = scope["app"].state.engine_client
        answers = await engine.collective_rpc(asked["method"], asked.get("timeout"), tuple(asked.get("args", ())))
        await JSONResponse({"results": answers})(scope, receive, send)
