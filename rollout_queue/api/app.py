"""The queue's HTTP application: routes, bearer token, and refusals as problems."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol import reasons, routes
from protocol.config import RunConfig
from rollout_queue.api import learner_routes, observer_routes, problems, worker_routes
from rollout_queue.broker import Broker, Clock
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.store.base import Store


def create_app(config: RunConfig, store: Store, clock: Clock | None = None) -> FastAPI:
    """The service over `store`, which it closes when it ends. `app.state.broker` is what it serves."""
    broker = Broker(config, store, clock or Clock())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with broker.running():
            yield

    app = FastAPI(title="Slipstream rollout queue", lifespan=lifespan, openapi_url=None)
    app.state.broker = broker
    problems.answer_in_problems(app)
    for side in (worker_routes, learner_routes, observer_routes):
        app.include_router(side.router)
    if config.token:
        app.add_middleware(BearerToken, token=config.token)
    return app


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
                await problems.answer(Refusal(reasons.UNAUTHORIZED, message))(scope, receive, send)
                return
        await self._app(scope, receive, send)
