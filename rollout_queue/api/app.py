"""The queue's HTTP application: routes, guards, and refusals as problems."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from protocol.config import RunConfig
from rollout_queue.api import learner_routes, observer_routes, requests, worker_routes
from rollout_queue.api.access import NoWebPages, RoleTokens, names_of_this_machine
from rollout_queue.broker.broker import Broker, Clock
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
    requests.install_error_bodies(app)
    for routes in (worker_routes.router, learner_routes.router, observer_routes.router):
        app.include_router(routes)
    app.add_middleware(NoWebPages, hosts=None if config.token else names_of_this_machine(config.queue.host))
    if config.token:
        app.add_middleware(RoleTokens, secret=config.token)
    return app
