"""The queue's HTTP application: its routes, the checks before them, and the bound on bodies that are being read.

Status, metrics, rollouts and health are answered here, for people, monitors and the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response

from slipstream.protocol import access, reasons
from slipstream.protocol.client import JSON
from slipstream.protocol.config import RunConfig
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Status
from slipstream.rollout_queue.api import learner_routes, page_routes, requests, schema, worker_routes
from slipstream.rollout_queue.api.access import Gate, names_of_this_machine
from slipstream.rollout_queue.api.entrance import Entrance
from slipstream.rollout_queue.api.requests import ByteBudget, ReadyBroker, handles, reply_json
from slipstream.rollout_queue.broker import lifecycle, status
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.clock import Clock
from slipstream.rollout_queue.ledger.records import Refusal
from slipstream.rollout_queue.observe import prometheus
from slipstream.rollout_queue.store.base import Store, StoreError

_MAX_ROLLOUTS = 256

_STORE_SIZE_S = 1.0

# The requests that carry groups and keep workers and learner alive.
_FLEETS = (
    access.DRAW_TICKETS,
    access.FAIL_TICKET,
    access.HEARTBEAT,
    access.SUBMIT_GROUP,
    access.LEASE,
    access.ACKNOWLEDGE,
    access.RENEW_LEASE,
)

_MAX_BYTES_OF_BODIES = 256 * 1024**2

router = APIRouter()


@handles(router, access.READ_HEALTH, answers={200: str})
async def health() -> Response:
    """Answer while the process is alive, even if its store has failed."""
    return Response("ok", media_type="text/plain")


@handles(router, access.READ_READY, answers={200: str})
async def ready(broker: ReadyBroker) -> Response:
    """Answer while this is the active queue and its store works, for those who choose which queue to ask."""
    broker.check_answers_soon()
    return Response("ok", media_type="text/plain")


@handles(router, access.READ_STATUS, answers={200: Status})
async def read_status(broker: ReadyBroker) -> Response:
    return reply_json(status.assemble(broker))


@handles(
    router,
    access.READ_ROLLOUTS,
    answers={200: list[RolloutView]},
    query={"limit": Annotated[int, msgspec.Meta(ge=1, lt=10**8)], "worst": bool, "eval": bool},
)
async def read_rollouts(request: Request, broker: ReadyBroker) -> Response:
    """Answer recent rollouts as a list of `RolloutView`.

    Query: `limit`, how many; `worst=true`, lowest reward first instead of newest first; `eval=true`, those of
    evaluations instead of training.
    """
    limit = request.query_params.get("limit", "16")
    if not (limit.isdecimal() and len(limit) < 9 and int(limit) >= 1):
        raise Refusal(reasons.UNDECODABLE, f"limit = {limit[:20]}: ask for 1 to {_MAX_ROLLOUTS} rollouts")
    worst, evals = (request.query_params.get(name, "") in ("1", "true") for name in ("worst", "eval"))
    seen = broker.observations.recent_evals if evals else broker.observations.recent
    return Response(seen.json(min(int(limit), _MAX_ROLLOUTS), worst), media_type=JSON)


@handles(router, access.READ_METRICS, answers={200: str}, texts=[prometheus.CONTENT_TYPE])
async def read_metrics(broker: ReadyBroker) -> Response:
    text = prometheus.render(status.assemble(broker), broker.observations.histograms, await _store_bytes(broker))
    return Response(text, media_type=prometheus.CONTENT_TYPE)


async def _store_bytes(broker: Broker) -> dict[str, int]:
    """Return the size of the store and of its write-ahead log; nothing if the store does not say."""

    def size() -> dict[str, int]:
        with contextlib.suppress(StoreError, OSError):
            found = broker.store.size()
            return {"all": found.bytes, "log": found.log_bytes}
        return {}

    # The metrics are needed most while a disk hangs.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STORE_SIZE_S):
            return await broker.writer.call(size)
    return {}


def create_app(config: RunConfig, store: Store, clock: Clock | None = None) -> FastAPI:
    """Build the service over `store`, which it closes when it ends. `app.state.broker` is what it serves."""
    broker = Broker(config, store, clock or Clock())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with lifecycle.running(broker):
            yield

    app = FastAPI(title="Slipstream rollout queue", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.broker = broker
    app.state.bodies = ByteBudget(max(_MAX_BYTES_OF_BODIES, config.queue.max_group_bytes))
    requests.install_error_bodies(app)
    for routes in (worker_routes.router, learner_routes.router, schema.router, page_routes.router, router):
        app.include_router(routes)
    gate = app.state.gate = Gate(config.token, names_of_this_machine(config.queue.host))
    handlers = {route: requests.ENDPOINTS[route].handler for route in _FLEETS}
    app.add_middleware(Entrance, gate=gate, broker=broker, handlers=handlers)
    return app
