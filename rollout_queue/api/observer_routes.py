"""Health, status and metrics: for people, monitors and the command line."""

from __future__ import annotations

from fastapi import APIRouter, Response

from protocol import routes
from rollout_queue.api.bodies import reply_json
from rollout_queue.api.dependencies import ReadyBroker
from rollout_queue.observe import prometheus, status

router = APIRouter()


@router.get(routes.HEALTH)
async def health() -> Response:
    """The process is alive, even if its store has failed."""
    return Response("ok")


@router.get(routes.READY)
async def ready(broker: ReadyBroker) -> Response:
    return Response("ok")


@router.get(routes.STATUS)
async def read_status(broker: ReadyBroker) -> Response:
    return reply_json(status.assemble(broker))


@router.get(routes.METRICS)
async def read_metrics(broker: ReadyBroker) -> Response:
    return Response(prometheus.render(status.assemble(broker)), media_type=prometheus.CONTENT_TYPE)
