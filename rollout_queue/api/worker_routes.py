"""The workers' routes: each reads its request, calls the operation in `broker.workers`, and encodes the answer."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from protocol import access, reasons
from protocol.messages import TicketFailure, TicketRequest, WorkerReport
from rollout_queue.api.requests import Bodies, ReadyBroker, handles, read_body, read_json, reply_json
from rollout_queue.broker import workers
from rollout_queue.ledger.records import Refusal

router = APIRouter()


@handles(router, access.DRAW_TICKETS)
async def draw_tickets(request: Request, broker: ReadyBroker) -> Response:
    """Answer 204 if there are no tickets after the wait."""
    message: TicketRequest = await read_json(request, TicketRequest)
    reply = await workers.draw_tickets(broker, message, request.is_disconnected)
    return reply_json(reply) if reply is not None else Response(status_code=204)


@handles(router, access.FAIL_TICKET)
async def fail_ticket(id: str, request: Request, broker: ReadyBroker) -> Response:
    failure: TicketFailure = await read_json(request, TicketFailure)
    await workers.fail_ticket(broker, id, failure)
    return Response(status_code=204)


@handles(router, access.HEARTBEAT)
async def heartbeat(id: str, request: Request, broker: ReadyBroker) -> Response:
    report: WorkerReport = await read_json(request, WorkerReport)
    if report.worker_id != id:
        raise Refusal(reasons.WORKER_MISMATCH, f"the path names worker {id!r}, the body {report.worker_id!r}")
    return reply_json(await workers.heartbeat(broker, report))


@handles(router, access.SIGN_OFF)
async def sign_off(id: str, broker: ReadyBroker) -> Response:
    await workers.sign_off(broker, id)
    return Response(status_code=204)


@handles(router, access.SUBMIT_GROUP)
async def submit_group(id: str, request: Request, broker: ReadyBroker, bodies: Bodies) -> Response:
    """Answer 201 for a group that is new, 200 if it is here already."""
    limit = broker.config.queue.max_group_bytes
    with bodies.share() as share:

        async def body() -> bytes:
            return await read_body(request, limit, "raise queue.max_group_bytes or shorten the episodes", share)

        if await workers.submit_group(broker, id, body):
            return Response(b"new", 201)
    # A client may read no answer before it has sent its whole body.
    async for _ in request.stream():
        pass
    return Response(b"had", 200)
