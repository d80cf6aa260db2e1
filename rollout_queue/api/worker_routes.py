"""The workers' side: tickets out, heartbeats, groups in.

Every change of the ledger stands within `async with broker.lock`: look, decide, commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from protocol import reasons, routes
from protocol.messages import TicketFailure, TicketReply, TicketRequest, WorkerReply, WorkerReport
from rollout_queue.api.bodies import read_body, read_json, reply_json
from rollout_queue.api.dependencies import ReadyBroker
from rollout_queue.broker import Broker
from rollout_queue.ledger import tickets, validation
from rollout_queue.ledger.records import TicketRecord, TicketState
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.wakeup import MAX_WAIT_S, wait

_REASON_CHARACTERS = 80  # a reason becomes a label of the metrics

router = APIRouter()


@router.post(routes.TICKETS)
async def ask_for_tickets(request: Request, broker: ReadyBroker) -> Response:
    """Tickets as soon as admission has any, 204 if there are none after the wait; refused once the run is finished."""
    message: TicketRequest = await read_json(request, TicketRequest)
    worker, ledger, waits = message.worker_id, broker.ledger, broker.observations.waits
    if message.max_tickets < 1:
        raise Refusal(reasons.MAX_TICKETS, f"max_tickets = {message.max_tickets}: ask for at least 1")
    if message.have is not None:
        undelivered = tickets.undelivered(ledger, worker, message.have)[: message.max_tickets]
        for record in undelivered:
            ledger.renew_ticket(record.id, broker.now)
        if undelivered:
            return _reply(broker, undelivered)
    deadline = broker.now + min(message.wait_s, MAX_WAIT_S)
    while True:
        room_came = broker.room_came.listen()
        broker.observations.worker_seen(worker, broker.now)
        if broker.grant().count or ledger.run.finished:
            async with broker.lock:
                if ledger.run.finished:
                    raise Refusal(reasons.RUN_FINISHED, "the run is finished: no more tickets are given")
                count = min(message.max_tickets, broker.grant().count)
                if count and not broker.closing and not await request.is_disconnected():
                    decision = tickets.issue(ledger, worker, count)
                    await broker.commit(decision)
                    waits.end(worker)
                    return _reply(broker, decision.tickets)
        grant = broker.grant()
        broker.admission.observe_refusal(grant)
        waits.begin(worker, grant.blocked_by or "a ticket", broker.now, until=broker.now + 2 * MAX_WAIT_S)
        if broker.closing or not await wait(room_came, deadline - broker.now):
            return Response(status_code=204)


@router.post(routes.TICKET_FAIL_OF)
async def give_back_ticket(id: str, request: Request, broker: ReadyBroker) -> Response:
    """End a ticket that yielded no group. If it has ended already, the call may be a repeat: nothing changes."""
    failure: TicketFailure = await read_json(request, TicketFailure)
    async with broker.lock:
        record = broker.ledger.get(id, TicketState.ISSUED)
        if record is not None and record.worker_id == failure.worker_id:
            reason = reasons.failed(failure.reason)[:_REASON_CHARACTERS]
            await broker.commit(tickets.fail(broker.ledger, record, reason, failure.retryable))
    return Response(status_code=204)


@router.post(routes.WORKER_OF)
async def heartbeat(id: str, request: Request, broker: ReadyBroker) -> Response:
    """Renew a worker's tickets and tell it which of them it has lost."""
    report: WorkerReport = await read_json(request, WorkerReport)
    if report.worker_id != id:
        raise Refusal(reasons.WORKER_MISMATCH, f"the path names worker {id!r}, the body {report.worker_id!r}")
    broker.observations.worker_reports(report, broker.now)
    lost = []
    for ticket_id in report.ticket_ids:
        record = broker.ledger.get(ticket_id)
        if record is None or (record.state is TicketState.ISSUED and record.worker_id != id):
            lost.append(ticket_id)
        else:
            broker.ledger.renew_ticket(ticket_id, broker.now)
    return reply_json(WorkerReply(lost, broker.fleet.servers, broker.ledger.run.finished))


@router.put(routes.GROUP_OF)
async def submit_group(id: str, request: Request, broker: ReadyBroker) -> Response:
    """201 for a group that is new, 200 if it is here already.

    Refused if its ticket has ended without a group, if it breaks a rule, and while there is no room for it.
    """
    try:
        limit = broker.config.queue.max_group_bytes
        body = await read_body(request, limit, "raise queue.max_group_bytes or shorten the episodes")
        if (record := broker.ledger.get(id, TicketState.ISSUED)) is not None:
            size, run = broker.config.rollout.group_size, broker.ledger.run
            vocabulary = getattr(run, "vocabulary", None)
            # In a thread, since a large group takes a while.
            facts = await asyncio.to_thread(validation.read, body, record, size, run.version, vocabulary)
            async with broker.lock:
                if (record := broker.ledger.get(id, TicketState.ISSUED)) is not None:
                    broker.fleet.check(facts, record.serial)
                    await broker.commit(tickets.submit(broker.ledger, record, facts), {id: body})
                    broker.observations.group_came(facts.tokens, broker.now)
                    return Response(b"new", 201)
        stored = await broker.call(broker.store.records, [id])
        tickets.check_accepted(id, stored.get(id))
        return Response(b"had", 200)
    except Refusal as refusal:
        if broker.failure is None:
            await _count_refused(broker, id, refusal)
        raise


async def _count_refused(broker: Broker, ticket_id: str, refusal: Refusal) -> None:
    """Count it. A group that only finds no room keeps its ticket, since its worker will come again; any other ends it,
    so that no permit leaks (F15)."""
    broker.observations.rejections[refusal.reason] += 1
    async with broker.lock:
        record = broker.ledger.get(ticket_id, TicketState.ISSUED)
        if record is not None and refusal.reason == reasons.FULL:
            broker.ledger.renew_ticket(ticket_id, broker.now)
        elif record is not None:
            reason = reasons.rejected(refusal.reason)
            await broker.commit(tickets.fail(broker.ledger, record, reason, retryable=True))


def _reply(broker: Broker, records: Sequence[TicketRecord]) -> Response:
    messages = [tickets.message(broker.ledger, record) for record in records]
    return reply_json(TicketReply(messages, broker.fleet.servers))
