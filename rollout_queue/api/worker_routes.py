"""The workers' side: tickets out, heartbeats, groups in.

Every change of the ledger stands within `async with broker.lock`: look, decide, commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from protocol import reasons, routes
from protocol.messages import Fingerprint, TicketFailure, TicketReply, TicketRequest, WorkerReply, WorkerReport
from rollout_queue.api.bodies import read_body, read_json, reply_json
from rollout_queue.api.dependencies import ReadyBroker
from rollout_queue.broker import Broker
from rollout_queue.ledger import registration, tickets, validation
from rollout_queue.ledger.records import TicketRecord, TicketState
from rollout_queue.ledger.refusal import Refusal
from rollout_queue.observe import recent
from rollout_queue.observe.variance import Rewards
from rollout_queue.wakeup import MAX_WAIT_S, wait

router = APIRouter()


@router.post(routes.TICKETS)
async def ask_for_tickets(request: Request, broker: ReadyBroker) -> Response:
    """Tickets as soon as admission has any, 204 if there are none after the wait; refused once the run is finished or
    given up, and to a worker that is not registered."""
    message: TicketRequest = await read_json(request, TicketRequest)
    worker, ledger, waits = message.worker_id, broker.ledger, broker.observations.waits
    if message.max_tickets < 1:
        raise Refusal(reasons.MAX_TICKETS, f"max_tickets = {message.max_tickets}: ask for at least 1")
    _check_welcome(broker, worker)
    if message.have is not None:
        undelivered = tickets.undelivered(ledger, worker, message.have)[: message.max_tickets]
        for record in undelivered:
            ledger.renew_ticket(record.id, broker.now)
        if undelivered:
            return _reply(broker, undelivered)
    deadline = broker.now + min(message.wait_s, MAX_WAIT_S)
    while True:
        room_came = broker.room_came.listen()
        _check_welcome(broker, worker)
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
            reason = reasons.failed(failure.reason)
            await broker.commit(tickets.fail(broker.ledger, record, reason, failure.retryable))
            _note_failure(broker, record, reason, failure.detail)
    return Response(status_code=204)


@router.post(routes.WORKER_OF)
async def heartbeat(id: str, request: Request, broker: ReadyBroker) -> Response:
    """Register a worker, renew its tickets, and tell it which of them it has lost. A worker that would make wrong data
    is refused, and its tickets go to others."""
    report: WorkerReport = await read_json(request, WorkerReport)
    if report.worker_id != id:
        raise Refusal(reasons.WORKER_MISMATCH, f"the path names worker {id!r}, the body {report.worker_id!r}")
    warnings = await _register(broker, id, report.fingerprint)
    broker.observations.worker_reports(report, broker.now)
    for trouble in report.troubles:
        broker.trial.trouble(trouble.kind, trouble.text)
    lost = []
    for ticket_id in report.ticket_ids:
        record = broker.ledger.get(ticket_id)
        if record is None or (record.state is TicketState.ISSUED and record.worker_id != id):
            lost.append(ticket_id)
        else:
            broker.ledger.renew_ticket(ticket_id, broker.now)
    return reply_json(WorkerReply(lost, broker.fleet.servers, broker.ledger.run.finished, list(warnings)))


@router.put(routes.GROUP_OF)
async def submit_group(id: str, request: Request, broker: ReadyBroker) -> Response:
    """201 for a group that is new, 200 if it is here already.

    Refused if its ticket has ended without a group, if it breaks a rule, and while there is no room for it.
    """
    try:
        if broker.ledger.get(id, TicketState.ISSUED) is not None:
            limit = broker.config.queue.max_group_bytes
            with broker.bodies.share() as share:
                body = await read_body(request, limit, "raise queue.max_group_bytes or shorten the episodes", share)
                if await _take_in(broker, id, body):
                    return Response(b"new", 201)
        stored = await broker.call(broker.store.records, [id])
        tickets.check_accepted(broker.ledger, id, stored.get(id))
        async for _ in request.stream():
            pass
        return Response(b"had", 200)
    except Refusal as refusal:
        if broker.failure is None:
            await _count_refused(broker, id, refusal)
        raise


async def _take_in(broker: Broker, ticket_id: str, body: bytes) -> bool:
    """Whether the group is new: false if its ticket is not out any more."""
    seen = broker.observations
    if (record := broker.ledger.get(ticket_id, TicketState.ISSUED)) is None:
        return False
    broker.register.check(broker.ledger.run, record.worker_id)
    async with broker.judging:
        # Both take a while for a large group.
        arrival = await asyncio.to_thread(validation.read, body, record, _rules(broker))
        shown = await asyncio.to_thread(recent.pick, arrival.group) if seen.recent.wants(broker.now) else None
    rewards = Rewards.of([rollout.reward for rollout in arrival.group.rollouts])
    async with broker.lock:
        if (record := broker.ledger.get(ticket_id, TicketState.ISSUED)) is None:
            return False
        broker.fleet.check(arrival.facts, record.serial)
        await broker.commit(tickets.submit(broker.ledger, record, arrival.facts), {ticket_id: body})
        broker.trial.succeeded()
        seen.group_came(ticket_id, arrival.facts.tokens, rewards, broker.now)
        if shown is not None:
            seen.recent.add(shown, broker.now)
    return True


def _rules(broker: Broker) -> validation.Rules:
    config, run = broker.config, broker.ledger.run
    longest = min(config.vllm.max_model_len, config.learner.token_budget)
    return validation.Rules(config.rollout.group_size, run.version, run.vocabulary, longest)


async def _count_refused(broker: Broker, ticket_id: str, refusal: Refusal) -> None:
    """Count it. A group that finds no room, or a queue that was restarted, keeps its ticket, since its worker will come
    again; so does one of another worker, as the ticket's own may still bring its group. Any other ends it, so that no
    permit leaks (F15)."""
    seen = broker.observations
    seen.rejections[refusal.reason] += 1
    if refusal.reason == reasons.FULL:
        seen.progress.found_full()
    async with broker.lock:
        record = broker.ledger.get(ticket_id, TicketState.ISSUED)
        if record is not None and refusal.reason in (reasons.FULL, reasons.UNREGISTERED):
            broker.ledger.renew_ticket(ticket_id, broker.now)
        elif record is not None and refusal.reason != reasons.WORKER_MISMATCH:
            seen.notices.say(refusal.reason, refusal.message, broker.now, record.worker_id, key=refusal.reason)
            reason = reasons.rejected(refusal.reason)
            await broker.commit(tickets.fail(broker.ledger, record, reason, retryable=True))
            _note_failure(broker, record, reason, refusal.message)


async def _register(broker: Broker, worker_id: str, given: Fingerprint | None) -> Sequence[str]:
    """Let a worker in and return what it is to be warned of, or refuse it (FINGERPRINT, SESSION_AWAITED)."""
    seen, notices = broker.observations, broker.observations.notices
    async with broker.lock:
        run = broker.ledger.run
        try:
            admitted = registration.admit(run, worker_id, given, broker.learner_lives)
        except Refusal as refusal:
            broker.register.strike(worker_id)
            if refusal.reason == reasons.SESSION_AWAITED:
                seen.worker_awaits_session(worker_id, broker.now)
            else:
                seen.session_came(worker_id)
                notices.say(refusal.reason, refusal.message, broker.now, worker_id)
            await broker.commit(registration.give_back(broker.ledger, worker_id))
            raise
        await broker.commit(admitted.decision)
        broker.register.enter(worker_id, run.session)
    seen.session_came(worker_id)
    if admitted.data_changed is not None:
        notices.say(reasons.FINGERPRINT, admitted.data_changed, broker.now, worker_id)
    for warning in admitted.warnings:
        notices.say(reasons.FINGERPRINT, warning, broker.now, worker_id)
    return admitted.warnings


def _check_welcome(broker: Broker, worker_id: str) -> None:
    """Refuses tickets once the run is given up (GAVE_UP), and to a worker that is not registered (UNREGISTERED)."""
    if not broker.ledger.run.finished:
        broker.trial.check()
        broker.register.check(broker.ledger.run, worker_id)


def _note_failure(broker: Broker, ended: TicketRecord, reason: str, detail: str) -> None:
    """A ticket yielded no group. If the run is given up by it, everyone who waits is told."""
    if broker.trial.failed(ended, reason, detail, broker.ledger.tickets(TicketState.ISSUED)):
        broker.room_came.notify()
        broker.groups_came.notify()


def _reply(broker: Broker, records: Sequence[TicketRecord]) -> Response:
    messages = [tickets.message(broker.ledger, record) for record in records]
    return reply_json(TicketReply(messages, broker.fleet.servers))
