"""The learner's side: sessions and checkpoints, leases and acknowledgements, servers, the run's end.

Every change of the ledger stands within `async with broker.lock`: look, decide, commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec
from fastapi import APIRouter, Request, Response

from protocol import access, codec, reasons
from protocol.addresses import check_name, normal_url
from protocol.client import MSGPACK
from protocol.messages import (
    BeginSession,
    Checkpointed,
    FinishRun,
    LeaseAck,
    LeaseRenewal,
    LeaseRenewed,
    LeaseReply,
    LeaseRequest,
    PolicyCommand,
    ServerChange,
)
from protocol.status import EvaluationRequest
from rollout_queue.api.requests import ReadyBroker, read_json, reply_json
from rollout_queue.broker.broker import MAX_WAIT_S, Broker, wait
from rollout_queue.ledger import evaluations, leases, servers
from rollout_queue.ledger.records import Refusal, TicketRecord, TicketState
from rollout_queue.observe.observations import FEEDER, LEARNER

_MAX_LEASE_BYTES = 32 * 1024**2  # a larger answer would hold up everybody else's

router = APIRouter()


@router.get(access.POLICY)
async def read_position(broker: ReadyBroker) -> Response:
    return reply_json(broker.position())


@router.post(access.POLICY)
async def command(request: Request, broker: ReadyBroker) -> Response:
    """Begin a session, note a checkpoint, or say what the learner waits for; answers the run's position."""
    message: PolicyCommand = await read_json(request, PolicyCommand)
    seen = broker.observations
    match message:
        case BeginSession():
            async with broker.lock:
                forgotten = await broker.call(broker.store.forgotten_after, message.step) if message.resume else []
                decision = leases.begin(broker.ledger, message, forgotten)
                gone = evaluations.begin(broker.evaluations, message)
                version = decision.run.version if decision.run is not None else broker.ledger.run.version
                unproven = servers.distrust_unproven(broker.fleet, version)
                await broker.commit(msgspec.structs.replace(decision, evals=gone, servers=unproven))
                broker.trial.begin(broker.ledger.ever_accepted)
            seen.session_began(broker.now)
        case Checkpointed():
            async with broker.lock:
                _fence(broker, message.session)
                oldest = leases.kept_checkpoints(broker.ledger, message.step)[0]
                first = await broker.call(broker.store.first_forgotten_after, oldest)
                await broker.commit(leases.checkpointed(broker.ledger, message.step, first))
        case _:
            _fence(broker, message.session)
            seen.learner_waits(message.what, broker.now)
    return reply_json(broker.position())


@router.post(access.EVALUATIONS)
async def ask_for_evaluation(request: Request, broker: ReadyBroker) -> Response:
    """Open an evaluation, or find that its step has one; answers all of them."""
    message: EvaluationRequest = await read_json(request, EvaluationRequest)
    async with broker.lock:
        _fence(broker, message.session)
        await broker.commit(evaluations.ask(broker.evaluations, broker.ledger.run, message, broker.clock.wall()))
    return reply_json(broker.evaluation_views())


@router.get(access.EVALUATIONS)
async def read_evaluations(request: Request, broker: ReadyBroker) -> Response:
    """All open evaluations and the newest of those that have ended, in the order in which they were asked for.

    `wait_s`: while one is open, answer when one ends, or after this many seconds.
    """
    given = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(given)
    except ValueError:
        raise Refusal(reasons.UNDECODABLE, f"wait_s = {given[:20]}: give seconds") from None
    ended = broker.evaluations_ended.listen()
    if wait_s > 0 and broker.evaluations.open and not broker.closing:
        await wait(ended, min(wait_s, MAX_WAIT_S))
    return reply_json(broker.evaluation_views())


@router.post(access.LEASES)
async def lease(request: Request, broker: ReadyBroker) -> Response:
    """Groups as soon as there are any, none after the wait."""
    message: LeaseRequest = await read_json(request, LeaseRequest)
    ledger, waits = broker.ledger, broker.observations.waits
    deadline = broker.now + min(message.wait_s, MAX_WAIT_S)
    while True:
        groups_came = broker.groups_came.listen()
        async with broker.lock:
            _fence(broker, message.session)
            broker.trial.check()
            ledger.renew_lease(message.lease_id, broker.now)
            lost = leases.undelivered(ledger, message.lease_id, message.have)
            more = ledger.count(TicketState.READY) > 0 and not broker.closing
            if lost or (more and not await request.is_disconnected()):
                wanted = 0 if lost else max(0, message.max_groups)
                await broker.commit(leases.lease(ledger, broker.fleet, message.lease_id, wanted, message.have))
            records = _fitting(leases.undelivered(ledger, message.lease_id, message.have))
            revoked = leases.revoked(ledger, broker.fleet, message.lease_id, message.have)
            if records or revoked:
                waits.end(FEEDER)
                payloads = await broker.call(broker.store.payloads, [record.id for record in records])
                return _reply(broker, message.lease_id, records, payloads, revoked)
        waits.begin(FEEDER, "groups", broker.now, until=broker.now + 2 * MAX_WAIT_S)
        if broker.closing or not await wait(groups_came, deadline - broker.now):
            return _reply(broker, message.lease_id, [], {}, {})


@router.post(access.LEASE_ACK_OF)
async def acknowledge(id: str, request: Request, broker: ReadyBroker) -> Response:
    """End groups as trained or dropped; a new step raises the policy's version.

    Renews lease `id`; the groups may be of any of this session's leases.
    """
    message: LeaseAck = await read_json(request, LeaseAck)
    async with broker.lock:
        _fence(broker, message.session)
        named = (*message.trained, *message.dropped)
        ended = [ticket_id for ticket_id in named if broker.ledger.get(ticket_id) is None]
        version = broker.ledger.run.version
        decision = leases.ack(broker.ledger, broker.fleet, message, await broker.call(broker.store.records, ended))
        await broker.record(id, decision)
        await broker.commit(decision)
        broker.ledger.renew_lease(id, broker.now)
        stepped = broker.ledger.run.version > version
        facts = broker.observations.acknowledged(decision.tickets, message.report, stepped, broker.now)
        if facts is not None:
            broker.admission.observe_step(facts)
            broker.room_came.notify()  # the depth may have grown after the commit woke the workers
    return reply_json(broker.position())


@router.post(access.LEASE_RENEW_OF)
async def renew(id: str, request: Request, broker: ReadyBroker) -> Response:
    """Answers which of its groups must not be trained; refused if the lease has expired and they may be leased anew."""
    message: LeaseRenewal = await read_json(request, LeaseRenewal)
    _fence(broker, message.session)
    leases.check_renewal(broker.ledger, id)
    broker.ledger.renew_lease(id, broker.now)
    return reply_json(LeaseRenewed(leases.revoked(broker.ledger, broker.fleet, id, message.have)))


@router.post(access.LEASE_RELEASE_OF)
async def release(id: str, request: Request, broker: ReadyBroker) -> Response:
    """Return a lease's groups untrained."""
    message: LeaseRenewal = await read_json(request, LeaseRenewal)
    async with broker.lock:
        _fence(broker, message.session)
        await broker.commit(leases.release(broker.ledger, id))
    return Response(status_code=204)


@router.get(access.SERVERS)
async def read_servers(broker: ReadyBroker) -> Response:
    return reply_json(broker.fleet.servers)


@router.put(access.SERVER_OF)
async def put_server(name: str, request: Request, broker: ReadyBroker) -> Response:
    """Register a server or change its state; answers its record. Only the newest learner may prove one."""
    change: ServerChange = await read_json(request, ServerChange)
    server = change.server
    if server.name != name:
        raise Refusal(reasons.SERVER_MISMATCH, f"the path names server {name!r}, the body {server.name!r}")
    try:
        check_name(server.name)
        server.url = normal_url(server.url)
    except ValueError as error:
        raise Refusal(reasons.SERVER_MISMATCH, str(error)) from None
    async with broker.lock:
        if change.session is None:
            servers.check_unfenced(broker.fleet, server)
        else:
            _fence(broker, change.session)
        decision = servers.put(broker.fleet, broker.ledger, server, broker.clock.wall())
        await broker.commit(broker.with_evals(decision))
    _note_ready(broker)
    return reply_json(broker.fleet.get(name))


@router.delete(access.SERVER_OF)
async def remove_server(name: str, request: Request, broker: ReadyBroker) -> Response:
    """Let a server drain, or with `now=true` end it at once; answers those that are registered then."""
    async with broker.lock:
        await broker.commit(broker.with_evals(servers.drain(broker.fleet, broker.ledger, name, broker.clock.wall())))
        if request.query_params.get("now") == "true":
            await broker.commit(broker.with_evals(servers.remove(broker.fleet, broker.ledger, [name])))
    await broker.remove_drained()
    return reply_json(broker.fleet.servers)


@router.post(access.FINISH)
async def finish(request: Request, broker: ReadyBroker) -> Response:
    """End the run: what is outstanding is dropped, and workers are told."""
    message: FinishRun = await read_json(request, FinishRun)
    async with broker.lock:
        _fence(broker, message.session)
        left = evaluations.finish(broker.evaluations, broker.fleet, broker.clock.wall())
        await broker.commit(msgspec.structs.replace(leases.finish(broker.ledger), evals=left))
    broker.observations.waits.end(LEARNER)
    return reply_json(broker.position())


def _fence(broker: Broker, session: int) -> None:
    """Refuse any but the newest session; note that the learner is alive."""
    leases.check_session(broker.ledger, session)
    broker.observations.learner_seen(broker.now)
    _note_ready(broker)


def _note_ready(broker: Broker) -> None:
    """With a learner and a server that serves, a step can be expected: if no worker comes, the alarm says so."""
    seen = broker.observations
    if seen.learner_seen_s_ago(broker.now) is not None and broker.fleet.served_version is not None:
        seen.progress.all_there(broker.now)


def _fitting(records: Sequence[TicketRecord]) -> Sequence[TicketRecord]:
    """As many of a lease's groups, at least one, as one answer carries; the next one delivers the others."""
    total = list(accumulate(record.group.bytes for record in records))
    return records[: max(1, bisect_right(total, _MAX_LEASE_BYTES))]


def _reply(
    broker: Broker,
    lease_id: str,
    records: Sequence[TicketRecord],
    payloads: dict[str, bytes],
    revoked: dict[str, str],
) -> Response:
    reply = LeaseReply(
        lease_id=lease_id,
        groups=[msgspec.Raw(payloads[record.id]) for record in records],
        version_at_arrival=[record.arrival_version for record in records],
        expires_in_s=broker.config.queue.lease_timeout_s,
        revoked=revoked,
    )
    return Response(codec.encode(reply), media_type=MSGPACK)
