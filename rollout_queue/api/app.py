"""The queue's HTTP application: routes, guards, and refusals as problems.

Health, status and metrics: for people, monitors and the command line.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI, Request, Response

from protocol import access, reasons
from protocol.client import JSON
from protocol.config import RunConfig
from rollout_queue.api import learner_routes, requests, worker_routes
from rollout_queue.api.access import NoWebPages, RoleTokens, names_of_this_machine
from rollout_queue.api.requests import ReadyBroker, reply_json
from rollout_queue.broker import status
from rollout_queue.broker.broker import Broker, Clock
from rollout_queue.ledger.records import Refusal
from rollout_queue.observe import prometheus
from rollout_queue.store.base import Store

_MAX_ROLLOUTS = 256

router = APIRouter()


@router.get(access.HEALTH)
async def health() -> Response:
    """The process is alive, even if its store has failed."""
    return Response("ok")


@router.get(access.READY)
async def ready(broker: ReadyBroker) -> Response:
    return Response("ok")


@router.get(access.STATUS)
async def read_status(broker: ReadyBroker) -> Response:
    return reply_json(status.assemble(broker))


@router.get(access.ROLLOUTS)
async def read_rollouts(request: Request, broker: ReadyBroker) -> Response:
    """Recent rollouts as a list of `RolloutView`: the newest `limit`, newest first, or with `worst=true` those of the
    lowest reward, lowest first. With `eval=true` those of evaluations, else those of training."""
    limit = request.query_params.get("limit", "16")
    if not (limit.isdecimal() and len(limit) < 9 and int(limit) >= 1):
        raise Refusal(reasons.UNDECODABLE, f"limit = {limit[:20]}: ask for 1 to {_MAX_ROLLOUTS} rollouts")
    worst, evals = (request.query_params.get(name, "") in ("1", "true") for name in ("worst", "eval"))
    seen = broker.observations.recent_evals if evals else broker.observations.recent
    return Response(seen.json(min(int(limit), _MAX_ROLLOUTS), worst), media_type=JSON)


@router.get(access.METRICS)
async def read_metrics(broker: ReadyBroker) -> Response:
    return Response(prometheus.render(status.assemble(broker)), media_type=prometheus.CONTENT_TYPE)


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
    for routes in (worker_routes.router, learner_routes.router, router):
        app.include_router(routes)
    app.add_middleware(NoWebPages, hosts=None if config.token else names_of_this_machine(config.queue.host))
    if config.token:
        app.add_middleware(RoleTokens, secret=config.token)
    return app
