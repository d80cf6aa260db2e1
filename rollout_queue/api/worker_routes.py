"""The workers' side: tickets out, heartbeats, groups in.

Every change of the ledger stands within `async with broker.lock`: look, decide, commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import ceil

import msgspec
from fastapi import APIRouter, Request, Response

from protocol import access, reasons
from protocol.messages import Fingerprint, TicketFailure, TicketReply, TicketRequest, WorkerReply, WorkerReport
from rollout_queue.api.requests import ReadyBroker, read_body, read_json, reply_json
from rollout_queue.broker.broker import MAX_WAIT_S, Broker, wait
from rollout_queue.ledger import evaluations, registration, tickets, validation
from rollout_queue.ledger.records import EVAL_TICKET, Decision, EvalRow, Refusal, TicketRecord, TicketState
from rollout_queue.observe import windows
from rollout_queue.observe.notices import Rewards

router = APIRouter()


@router.post(access.TICKETS)
async def ask_for_tickets(request: Request, broker: ReadyBroker) -> Response:
    """Tickets as soon as admission has any, 204 if there are none after the wait, and the fleet alone as soon as a
    server leaves service that the worker uses; refused once the run is finished or given up, and to a worker that is
    not registered."""
    message: TicketRequest = await read_json(request, TicketRequest)
    worker, ledger, waits = message.worker_id, broker.ledger, broker.observations.waits
    if message.max_tickets < 1:
        raise Refusal(reasons.MAX_TICKETS, f"max_tickets = {message.max_tickets}: ask for at least 1")
    _check_welcome(broker, worker)
    if message.have is not None:
        undelivered = tickets.undelivered(ledger, worker, message.have)[: message.max_tickets]
        rows = evaluations.undelivered(broker.evaluations, worker, message.have)
        for record in undelivered:
            ledger.renew_ticket(record.id, broker.now)
        for row in rows:
            broker.evaluations.renew_ticket(row.id, broker.now)
        if undelivered or rows:
            return _reply(broker, undelivered, rows)
    deadline = broker.now + min(message.wait_s, MAX_WAIT_S)
    while True:
        room_came = broker.room_came.listen()
        _check_welcome(broker, worker)
        broker.observations.worker_seen(worker, broker.now)
        if broker.grant().count or broker.evaluations.open or ledger.run.finished:
            async with broker.lock:
                if ledger.run.finished:
                    raise Refusal(reasons.RUN_FINISHED, "the run is finished: no more tickets are given")
                decision = _granted(broker, worker, message.max_tickets)
                if decision and not broker.closing and not await request.is_disconnected():
                    await broker.commit(decision)
                    if decision.tickets or decision.evals.rows:
                        waits.end(worker)
                        return _reply(broker, decision.tickets, decision.evals.rows)
        if broker.fleet.servers and not broker.fleet.all_serve(message.serving):
            return _reply(broker, [], [])
        grant = broker.grant()
        broker.admission.observe_refusal(grant)
        waits.begin(worker, grant.blocked_by or "a ticket", broker.now, until=broker.now + 2 * MAX_WAIT_S)
        if broker.closing or not await wait(room_came, deadline - broker.now):
            return Response(status_code=204)


@router.post(access.TICKET_FAIL_OF)
async def give_back_ticket(id: str, request: Request, broker: ReadyBroker) -> Response:
    """End a ticket that yielded no group. If it has ended already, the call may be a repeat: nothing changes."""
    failure: TicketFailure = await read_json(request, TicketFailure)
    async with broker.lock:
        record = broker.ledger.get(id, TicketState.ISSUED)
        if record is not None and record.worker_id == failure.worker_id:
            reason = reasons.failed(failure.reason)
            await broker.commit(tickets.fail(broker.ledger, record, reason, failure.retryable))
            _note_failure(broker, record, reason, failure.detail)
        row = broker.evaluations.ticket(id)
        if row is not None and row.worker_id == failure.worker_id:
            await _fail_row(broker, row, reasons.failed(failure.reason), failure.retryable)
    return Response(status_code=204)


@router.post(access.WORKER_OF)
async def heartbeat(id: str, request: Request, broker: ReadyBroker) -> Response:
    """Register a worker, renew its tickets, and tell it which of them it has lost. A worker that would make wrong data
    is refused, and its tickets go to others."""
    report: WorkerReport = await read_json(request, WorkerReport)
    if report.worker_id != id:
        raise Refusal(reasons.WORKER_MISMATCH, f"the path names worker {id!r}, the body {report.worker_id!r}")
    warnings = await _register(broker, id, report.fingerprint)
    broker.observations.worker_reports(report, broker.now)
    if report.draining:
        await broker.remove_drained()
    for trouble in report.troubles:
        broker.trial.trouble(trouble.kind, trouble.text)
    lost = []
    for ticket_id in report.ticket_ids:
        row = broker.evaluations.ticket(ticket_id)
        if row is not None and row.worker_id == id:
            broker.evaluations.renew_ticket(ticket_id, broker.now)
            continue
        record = broker.ledger.get(ticket_id)
        if record is None or (record.state is TicketState.ISSUED and record.worker_id != id):
            lost.append(ticket_id)
        else:
            broker.ledger.renew_ticket(ticket_id, broker.now)
    run = broker.ledger.run
    return reply_json(WorkerReply(lost, broker.fleet.servers, run.finished, list(warnings), run.id))


@router.delete(access.WORKER_OF)
async def sign_off(id: str, broker: ReadyBroker) -> Response:
    """A worker ends, and has no request on any server any more: nobody waits for its next heartbeat. One that is not
    known may have signed off before."""
    broker.register.strike(id)
    broker.observations.worker_left(id)
    await broker.remove_drained()
    return Response(status_code=204)


@router.put(access.GROUP_OF)
async def submit_group(id: str, request: Request, broker: ReadyBroker) -> Response:
    """201 for a group that is new, 200 if it is here already.

    Refused if its ticket has ended without a group, if it breaks a rule, and while there is no room for it.
    """
    try:
        if _out(broker, id) is not None:
            limit = broker.config.queue.max_group_bytes
            with broker.bodies.share() as share:
                body = await read_body(request, limit, "raise queue.max_group_bytes or shorten the episodes", share)
                if await _take_in(broker, id, body):
                    return Response(b"new", 201)
        if id.startswith(EVAL_TICKET):
            evaluations.check_accepted(broker.evaluations, id)
        else:
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
    if (record := _out(broker, ticket_id)) is None:
        return False
    step, recent_ones = None, seen.recent
    if isinstance(record, EvalRow):
        step, recent_ones = broker.evaluations.of(record.evaluation).record.step, seen.recent_evals
    broker.register.check(broker.ledger.run, record.worker_id)
    async with broker.judging:
        # Both take a while for a large group.
        arrival = await asyncio.to_thread(validation.read, body, record, _rules(broker, record))
        shown = (
            await asyncio.to_thread(windows.pick_rollouts, arrival.group, step)
            if recent_ones.wants(broker.now)
            else None
        )
    rewards = Rewards.of([rollout.reward for rollout in arrival.group.rollouts])
    async with broker.lock:
        if (record := _out(broker, ticket_id)) is None:
            return False
        broker.fleet.check(arrival.facts, record.serial)
        if isinstance(record, EvalRow):
            result = evaluations.row_result(arrival.group, arrival.facts)
            done = evaluations.submit(broker.evaluations, broker.fleet, record, result, broker.clock.wall())
            await broker.commit(Decision(evals=done))
        else:
            taken = tickets.submit(broker.ledger, record, arrival.facts)
            if taken.tickets[0].state is not TicketState.READY:
                await broker.commit(taken)
                tickets.check_accepted(broker.ledger, ticket_id, taken.tickets[0])
            await broker.commit(taken, {ticket_id: body})
            broker.trial.succeeded()
            seen.group_came(ticket_id, arrival.facts.tokens, rewards, broker.now)
        if shown is not None:
            recent_ones.add(shown, broker.now)
    return True


def _out(broker: Broker, ticket_id: str) -> TicketRecord | EvalRow | None:
    """The ticket of this id, if it is with a worker."""
    return broker.ledger.get(ticket_id, TicketState.ISSUED) or broker.evaluations.ticket(ticket_id)


def _granted(broker: Broker, worker_id: str, wanted: int) -> Decision:
    """Tickets for a worker: those of evaluations first, as far as their share goes, and training's for what is left."""
    config, ledger, run = broker.config, broker.ledger, broker.ledger.run
    capacity = broker.observations.capacity_of(worker_id) or config.worker.episodes
    asking = evaluations.asking(config, run, worker_id, wanted, capacity)
    served, wall_time = broker.fleet.served_version, broker.clock.wall()
    evals = evaluations.issue(broker.evaluations, run, served, ledger.issued, asking, wall_time)
    episodes = broker.evaluations.episodes_of(evals.rows)
    count = min(wanted - ceil(episodes / config.rollout.group_size), broker.grant().count)
    issued = tickets.issue(ledger, worker_id, count) if count > 0 else Decision()
    return msgspec.structs.replace(issued, evals=evals)


def _rules(broker: Broker, ticket: TicketRecord | EvalRow) -> validation.Rules:
    config, run = broker.config, broker.ledger.run
    longest = min(config.vllm.max_model_len, config.learner.token_budget)
    if isinstance(ticket, EvalRow):
        size = broker.evaluations.of(ticket.evaluation).record.group_size
        return validation.Rules(size, run.version, run.vocabulary, longest, fewest=1)
    return validation.Rules(config.rollout.group_size, run.version, run.vocabulary, longest)


async def _fail_row(broker: Broker, row: EvalRow, reason: str, retryable: bool) -> None:
    failed = evaluations.fail(broker.evaluations, broker.fleet, row, reason, retryable, broker.clock.wall())
    await broker.commit(Decision(evals=failed))


async def _count_refused(broker: Broker, ticket_id: str, refusal: Refusal) -> None:
    """Count it. A group that finds no room, or a queue that was restarted, keeps its ticket, since its worker will come
    again; so does one of another worker, as the ticket's own may still bring its group. Any other ends it, so that no
    permit leaks (F15)."""
    seen = broker.observations
    seen.rejections[refusal.reason] += 1
    if refusal.reason == reasons.FULL:
        seen.progress.found_full()
    async with broker.lock:
        record = _out(broker, ticket_id)
        if record is not None and refusal.reason in (reasons.FULL, reasons.UNREGISTERED):
            broker.ledger.renew_ticket(ticket_id, broker.now)
            broker.evaluations.renew_ticket(ticket_id, broker.now)
        elif record is not None and refusal.reason != reasons.WORKER_MISMATCH:
            seen.notices.say(refusal.reason, refusal.message, broker.now, record.worker_id, key=refusal.reason)
            reason = reasons.rejected(refusal.reason)
            if isinstance(record, EvalRow):
                await _fail_row(broker, record, reason, retryable=True)
            else:
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
            held = registration.give_back(broker.ledger, worker_id)
            rows = evaluations.give_back(broker.evaluations, broker.fleet, worker_id, broker.clock.wall())
            await broker.commit(msgspec.structs.replace(held, evals=rows))
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


def _reply(broker: Broker, records: Sequence[TicketRecord], rows: Sequence[EvalRow]) -> Response:
    messages = [evaluations.message(broker.evaluations, broker.ledger.run, row) for row in rows]
    messages += [tickets.message(broker.ledger, record) for record in records]
    return reply_json(TicketReply(messages, broker.fleet.servers, broker.ledger.run.id))
