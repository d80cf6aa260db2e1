"""The workers' routes: each reads its request, calls the operation in `broker.workers`, and encodes the answer."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from slipstream.protocol import access, reasons
from slipstream.protocol.messages import Group, TicketFailure, TicketReply, TicketRequest, WorkerReply, WorkerReport
from slipstream.rollout_queue.api.requests import (
    ByteBudget,
    ReadyBroker,
    handles,
    has_left,
    read_body,
    read_json,
    reply_json,
)
from slipstream.rollout_queue.broker import workers
from slipstream.rollout_queue.ledger.records import Refusal

router = APIRouter()


@handles(router, access.DRAW_TICKETS, TicketRequest, {200: TicketReply, 204: None})
async def draw_tickets(request: Request, broker: ReadyBroker) -> Response:
    """Answer 204 if there are no tickets after the wait."""
    message: TicketRequest = await read_json(request, TicketRequest)
    reply = await workers.draw_tickets(broker, message, has_left(request))
    return reply_json(reply) if reply is not None else Response(status_code=204)


@handles(router, access.FAIL_TICKET, TicketFailure, {204: None})
async def fail_ticket(request: Request, broker: ReadyBroker, id: str) -> Response:
    failure: TicketFailure = await read_json(request, TicketFailure)
    await workers.fail_ticket(broker, id, failure)
    return Response(status_code=204)


@handles(router, access.HEARTBEAT, WorkerReport, {200: WorkerReply})
async def heartbeat(request: Request, broker: ReadyBroker, id: str) -> Response:
    report: WorkerReport = await read_json(request, WorkerReport)
    if report.worker_id != id:
        raise Refusal(reasons.WORKER_MISMATCH, f"the path names worker {id!r}, the body {report.worker_id!r}")
    return reply_json(await workers.heartbeat(broker, report))


@handles(router, access.SIGN_OFF, answers={204: None})
async def sign_off(request: Request, broker: ReadyBroker, id: str) -> Response:
    await workers.sign_off(broker, id)
    return Response(status_code=204)


@handles(router, access.SUBMIT_GROUP, Group, {200: bytes, 201: bytes})
async def submit_group(request: Request, broker: ReadyBroker, id: str) -> Response:
    """Answer 201 for a group that is new, 200 if it is here already."""
    limit = broker.config.queue.max_group_bytes
    bodies: ByteBudget = request.app.state.bodies
    with bodies.share() as share:

        async def body() -> bytes:
            return await read_body(request, limit, "raise queue.max_group_bytes or shorten the episodes", share)

        if await workers.submit_group(broker, id, body):
            return Response(b"new", 201)
    # A client may read no answer before it has sent its whole body.
    async for _ in request.stream():
        pass
    return Response(b"had", 200)
