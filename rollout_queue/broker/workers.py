"""Operations of the workers' side: draw tickets, fail them, send heartbeats, submit groups, sign off.

Each takes messages and returns messages, and knows nothing of HTTP. Where an operation decides, it looks and applies
within `async with broker.lock`. It makes its answer at once, and gives it once the store has what the answer tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import ceil

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.messages import Server, TicketFailure, TicketReply, TicketRequest, WorkerReply, WorkerReport
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.waiting import MAX_POLLS, MAX_WAIT_S, Place
from slipstream.rollout_queue.ledger import evaluations, registration, tickets, validation
from slipstream.rollout_queue.ledger.records import (
    Decision,
    EvalRecord,
    Refusal,
    RowOutcome,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.observe import windows
from slipstream.rollout_queue.observe.notices import CHANGED
from slipstream.rollout_queue.observe.windows import GroupOutcome

# Groups up to this size are validated on the event loop, which takes about a millisecond; larger ones in a thread.
_MAX_BYTES_AT_ONCE = 256 * 1024

_RETRY_AFTER_S = 5.0


async def draw_tickets(
    broker: Broker, request: TicketRequest, has_left: Callable[[], Awaitable[bool]]
) -> TicketReply | None:
    """Wait for tickets and issue them.

    Args:
        has_left: Tells whether the caller has hung up. Nothing is issued to one that has.

    Returns:
        Tickets as soon as admission grants any; no tickets but the fleet as soon as a server that the worker uses
        leaves service; None if neither happens within `request.wait_s`.

    Raises:
        Refusal: MAX_TICKETS; RUN_FINISHED or GAVE_UP once the run is over; UNREGISTERED; BUSY for one poll more than a
            worker may have.
    """
    worker, ledger, waits = request.worker_id, broker.ledger, broker.observations.waits
    if request.max_tickets < 1:
        raise Refusal(reasons.MAX_TICKETS, f"max_tickets = {request.max_tickets}: ask for at least 1")
    _check_may_draw(broker, worker)
    if request.have is not None:
        undelivered = tickets.undelivered(ledger, worker, request.have)
        # Those of evaluations come first. A worker counts its room in tickets of the training.
        evals = sum(record.evaluation is not None for record in undelivered)
        delivered = undelivered[: evals + request.max_tickets]
        for record in delivered:
            ledger.renew_ticket(record.id, broker.now)
        if delivered:
            reply = _ticket_reply(broker, request, delivered)
            await broker.writer.newest
            return reply
    if not await broker.line.has_room_for(worker):
        broker.observations.connections.refuse(broker.now)
        raise Refusal(
            reasons.BUSY,
            f"worker {worker} asks for tickets {MAX_POLLS} times at once: do others have its name? Give each its own",
            retry_after_s=_RETRY_AFTER_S,
        )
    began = broker.now
    deadline = began + min(request.wait_s, MAX_WAIT_S)
    with broker.line.place(worker, request.serving, has_left) as place:
        while True:
            broker.observations.workers.seen(worker, broker.now)
            async with broker.lock:
                _check_may_draw(broker, worker)
                if ledger.run.finished:
                    raise Refusal(reasons.RUN_FINISHED, "the run is finished: no more tickets are given")
                decision = Decision() if broker.closing else _issue(broker, place, request.max_tickets)
                if decision and await has_left():
                    return None
                if decision:
                    commit = broker.apply(decision)
                    if decision.tickets:
                        waits.end(worker)
                        reply = _ticket_reply(broker, request, decision.tickets)
                        break
            if broker.fleet.servers and not broker.fleet.all_serve(request.serving):
                return _ticket_reply(broker, msgspec.structs.replace(request, fleet=""), [])
            grant = broker.grant()
            broker.admission.observe_refusal(grant)
            waits.begin(worker, grant.blocked_by or "a ticket", broker.now, until=broker.now + 2 * MAX_WAIT_S)
            if broker.closing or not await place.wait(deadline - broker.now):
                broker.observations.histograms.poll_s(broker.now - began)
                return None
    broker.observations.histograms.poll_s(broker.now - began)
    await commit
    return reply


async def fail_ticket(broker: Broker, ticket_id: str, failure: TicketFailure) -> None:
    """End a ticket that yielded no group. Changes nothing if it has ended already: the call may be a repeat."""
    reason = reasons.failed(failure.reason)
    async with broker.lock:
        record = broker.ledger.get(ticket_id, TicketState.ISSUED)
        if record is None or record.worker_id != failure.worker_id:
            commit = broker.writer.newest
        else:
            commit = broker.apply(tickets.fail(broker.ledger, record, reason, failure.retryable))
            _observe_failure(broker, record, reason, failure.detail)
    await commit


async def heartbeat(broker: Broker, report: WorkerReport) -> WorkerReply:
    """Register a worker, renew its tickets, and tell it which of them it has lost.

    Raises:
        Refusal: FINGERPRINT or SESSION_AWAITED for a worker that would make wrong data. Its tickets go to others.
    """
    worker = report.worker_id
    for ticket_id in report.ticket_ids:
        record = broker.ledger.get(ticket_id, TicketState.ISSUED)
        if record is not None and record.worker_id == worker:
            broker.ledger.renew_ticket(ticket_id, broker.now)
    warnings = await _register(broker, report)
    broker.observations.worker_reports(report, broker.now)
    if report.draining:
        await broker.remove_drained()
    for notice in report.notices:
        broker.early_failures.add_text(notice.kind, notice.text)
    lost = []
    for ticket_id in report.ticket_ids:
        record = broker.ledger.get(ticket_id)
        if record is None or (record.state is TicketState.ISSUED and record.worker_id != worker):
            lost.append(ticket_id)
    run = broker.ledger.run
    servers = _fleet_for(broker, report.fleet)
    reply = WorkerReply(lost, servers, run.finished, list(warnings), run.id, broker.fleet_state)
    await broker.writer.newest
    return reply


async def sign_off(broker: Broker, worker_id: str) -> None:
    """Forget a worker that ends and has no request on any server any more, so that nobody waits for its heartbeat.

    A worker that is not known may have signed off before: nothing happens.
    """
    broker.registry.remove(worker_id)
    broker.observations.worker_left(worker_id)
    await broker.remove_drained()


async def submit_group(broker: Broker, ticket_id: str, read_body: Callable[[], Awaitable[bytes]]) -> bool:
    """Take in the group of a ticket.

    Args:
        read_body: Reads the group, msgpack. Called only while the ticket is with a worker: a repeat is answered
            without its bytes.

    Returns:
        True if the group is new, False if the queue has it already.

    Raises:
        Refusal: The ticket has ended without a group (TICKET_ENDED, TICKET_UNKNOWN), the group breaks a rule of
            `ledger.validation`, there is no room for it (FULL), or what `read_body` raises.
    """
    try:
        if _issued_ticket(broker, ticket_id) is not None and await _accept(broker, ticket_id, await read_body()):
            return True
        stored = await broker.writer.read(broker.store.records, [ticket_id])
        tickets.check_accepted(broker.ledger, ticket_id, stored.get(ticket_id))
        return False
    except Refusal as refusal:
        if broker.failure is None:
            await _observe_refusal(broker, ticket_id, refusal)
        raise


async def _accept(broker: Broker, ticket_id: str, body: bytes) -> bool:
    """Validate a group and commit it. Returns False if its ticket is not with a worker any more."""
    seen = broker.observations
    if (record := _issued_ticket(broker, ticket_id)) is None:
        return False
    evaluation = broker.ledger.evaluations.record_of(record)
    step, recent_ones = (None, seen.recent) if evaluation is None else (evaluation.step, seen.recent_evals)
    broker.registry.check_registered(broker.ledger.run, record.worker_id)
    rules = _rules(broker, evaluation)
    picked = recent_ones.wants(broker.now)
    learner = broker.config.learner
    if len(body) <= _MAX_BYTES_AT_ONCE:
        arrival, outcome, shown = _read(body, record, rules, step, picked, learner)
    else:
        async with broker.judging:
            arrival, outcome, shown = await asyncio.to_thread(_read, body, record, rules, step, picked, learner)
    async with broker.lock:
        if (record := _issued_ticket(broker, ticket_id)) is None:
            return False
        broker.registry.check_registered(broker.ledger.run, record.worker_id)  # a session may have begun meanwhile
        broker.fleet.check_group(arrival.facts, record.serial)
        if evaluation is not None:
            commit = broker.apply(evaluations.accept(record, arrival.group, arrival.facts))
        else:
            went = None if record.row is None else RowOutcome.of(arrival.group)
            taken = tickets.submit(broker.ledger, record, arrival.facts, went)
            if taken.tickets[0].state is not TicketState.READY:
                await broker.apply(taken)
                tickets.check_accepted(broker.ledger, ticket_id, taken.tickets[0])
            commit = broker.apply(taken, {ticket_id: body})
            broker.early_failures.succeeded()
            seen.group_came(arrival.facts.tokens, outcome, broker.now)
        if shown is not None:
            recent_ones.add(shown, broker.now)
    await commit
    return True


def _read(
    body: bytes, record: TicketRecord, rules: validation.Rules, step: int | None, picked: bool, learner: LearnerSection
) -> tuple[validation.Arrival, GroupOutcome, list[windows.Shown] | None]:
    """Validate a group and say what became of it; where it is `picked`, return some of its rollouts for people
    besides. `learner`: says what advantages compare."""
    arrival = validation.read(body, record, rules)
    shown = windows.pick_rollouts(arrival.group, step) if picked else None
    discount = None if learner.credit == "episode" else learner.credit_discount
    outcome = GroupOutcome.of(arrival.group, learner.advantage == "gdpo", discount)
    return arrival, outcome, shown


def _issued_ticket(broker: Broker, ticket_id: str) -> TicketRecord | None:
    """Return the ticket of this id if it is with a worker."""
    return broker.ledger.get(ticket_id, TicketState.ISSUED)


def _issue(broker: Broker, place: Place, wanted: int) -> Decision:
    """Decide on tickets for a worker: those of evaluations first, within their share; training gets what is left.

    A newcomer leaves the permits to those who were called from the line before it.
    """
    config, ledger, worker_id = broker.config, broker.ledger, place.worker_id
    permits = broker.grant().count
    if not place.has_waited:
        permits -= broker.line.spoken_for
    if not ledger.evaluations.open:
        count = min(wanted, permits)
        return tickets.issue(ledger, worker_id, count) if count > 0 else Decision()
    capacity = broker.observations.workers.capacity_of(worker_id) or config.worker.episodes
    asking = evaluations.asking(config, ledger.run, worker_id, wanted, capacity)
    evaluated = evaluations.issue(ledger, broker.fleet.served_version, asking)
    episodes = evaluations.episodes_of(ledger, evaluated.tickets)
    count = min(wanted - ceil(episodes / config.rollout.group_size), permits)
    trained = tickets.issue(ledger, worker_id, count) if count > 0 else Decision()
    return msgspec.structs.replace(evaluated, tickets=(*evaluated.tickets, *trained.tickets))


def _rules(broker: Broker, evaluation: EvalRecord | None) -> validation.Rules:
    config, run = broker.config, broker.ledger.run
    max_tokens = min(config.vllm.max_model_len, config.learner.token_budget)
    if evaluation is not None:
        return validation.Rules(evaluation.group_size, run.version, run.vocabulary, max_tokens, min_rollouts=1)
    return validation.Rules(config.rollout.group_size, run.version, run.vocabulary, max_tokens)


async def _observe_refusal(broker: Broker, ticket_id: str, refusal: Refusal) -> None:
    """Count a refused group, and end its ticket unless the group may still come, so that no permit leaks.

    The ticket stays where there was no room or the queue was restarted, since its worker will come again, and where
    another worker sent the group, since the ticket's own worker may still send one.
    """
    seen = broker.observations
    seen.rejections[refusal.reason] += 1
    if refusal.reason == reasons.FULL:
        seen.progress.found_full()
    async with broker.lock:
        record = _issued_ticket(broker, ticket_id)
        if record is not None and refusal.reason in (reasons.FULL, reasons.UNREGISTERED):
            broker.ledger.renew_ticket(ticket_id, broker.now)
        elif record is not None and refusal.reason != reasons.WORKER_MISMATCH:
            seen.notices.say(refusal.reason, refusal.message, broker.now, record.worker_id, key=refusal.reason)
            reason = reasons.rejected(refusal.reason)
            broker.apply(tickets.fail(broker.ledger, record, reason, retryable=True))
            _observe_failure(broker, record, reason, refusal.message)


async def _register(broker: Broker, report: WorkerReport) -> Sequence[str]:
    """Admit a worker and return its warnings.

    Raises:
        Refusal: BUSY where there is no room; FINGERPRINT or SESSION_AWAITED, which frees the worker's tickets.
    """
    seen, notices, worker_id = broker.observations, broker.observations.notices, report.worker_id
    async with broker.lock:
        run = broker.ledger.run
        try:
            broker.registry.check_room(worker_id, broker.now)
        except Refusal:
            seen.connections.refuse(broker.now)
            raise
        try:
            rows = broker.ledger.rows
            admitted = registration.admit(run, worker_id, report.fingerprint, broker.learner_lives, rows)
        except Refusal as refusal:
            broker.registry.remove(worker_id)
            if refusal.reason == reasons.SESSION_AWAITED:
                seen.worker_awaits_session(worker_id, broker.now)
            else:
                seen.worker_refused(report, refusal.message, broker.now)
                notices.say(refusal.reason, refusal.message, broker.now, worker_id)
            broker.apply(tickets.give_back(broker.ledger, worker_id))
            raise
        commit = broker.apply(admitted.decision)
        broker.registry.add(worker_id, run.session, broker.now)
    await commit
    seen.session_came(worker_id)
    if admitted.changed is not None:
        notices.say(CHANGED, admitted.changed, broker.now, worker_id)
    warnings = list(admitted.warnings)
    if (twins := broker.registry.twins(worker_id, (report.host, report.pid), broker.now)) is not None:
        warnings.append(twins)
    for warning in warnings:
        notices.say(CHANGED, warning, broker.now, worker_id)
    return warnings


def _check_may_draw(broker: Broker, worker_id: str) -> None:
    """Refuse tickets once the run is given up (GAVE_UP), and to a worker that is not registered (UNREGISTERED)."""
    if not broker.ledger.run.finished:
        broker.early_failures.check_not_given_up()
        broker.registry.check_registered(broker.ledger.run, worker_id)


def _observe_failure(broker: Broker, ended: TicketRecord, reason: str, detail: str) -> None:
    """Count a training ticket that yielded no group, and wake everyone who waits if the run is given up by it."""
    if ended.evaluation is not None:
        return
    broker.observations.symptoms.ticket_failed(reason)
    if broker.early_failures.failed(ended, reason, detail, broker.ledger.tickets(TicketState.ISSUED)):
        broker.wake_all()


def _ticket_reply(broker: Broker, request: TicketRequest, records: Sequence[TicketRecord]) -> TicketReply:
    messages = [tickets.message(broker.ledger, record) for record in records]
    return TicketReply(messages, _fleet_for(broker, request.fleet), broker.ledger.run.id, broker.fleet_state)


def _fleet_for(broker: Broker, known: str) -> list[Server] | None:
    """Return the fleet for a worker that knows it in the state `known`; None if it is still in that state."""
    return None if known == broker.fleet_state else broker.fleet.servers
