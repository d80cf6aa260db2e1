"""Operations of the learner's side: sessions, leases, acknowledgements, evaluations, servers, the end of the run.

Each takes messages and returns messages, and knows nothing of HTTP. Every change of the ledger stands within
`async with broker.lock`: look, decide, commit. All but the registration of a server are fenced: they refuse every
session but the newest (SESSION_SUPERSEDED).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from protocol import reasons
from protocol.addresses import check_name, normal_url
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
    RunPosition,
    Server,
    ServerChange,
)
from protocol.status import Evaluation, EvaluationRequest
from rollout_queue.broker.broker import MAX_WAIT_S, Broker, wait
from rollout_queue.ledger import evaluations, leases, servers
from rollout_queue.ledger.records import Refusal, TicketRecord, TicketState
from rollout_queue.observe.observations import FEEDER, LEARNER

MAX_LEASE_BYTES = 32 * 1024**2  # a larger answer would hold up everybody else's


async def command(broker: Broker, message: PolicyCommand) -> RunPosition:
    """Begin a session, note a checkpoint, or note what the learner waits for.

    Raises:
        Refusal: RUN_EXISTS, STEP_UNKNOWN or OUT_OF_RANGE for a session or checkpoint that does not fit the run.
    """
    match message:
        case BeginSession():
            await _begin_session(broker, message)
        case Checkpointed():
            async with broker.lock:
                _check_session(broker, message.session)
                oldest = leases.kept_checkpoints(broker.ledger, message.step)[0]
                first = await broker.call(broker.store.first_forgotten_after, oldest)
                await broker.commit(leases.checkpointed(broker.ledger, message.step, first))
        case _:
            _check_session(broker, message.session)
            broker.observations.learner_waits(message.what, broker.now)
    return broker.position()


async def _begin_session(broker: Broker, message: BeginSession) -> None:
    async with broker.lock:
        forgotten = await broker.call(broker.store.forgotten_after, message.step) if message.resume else []
        decision = leases.begin(broker.ledger, message, forgotten)
        version = decision.run.version if decision.run is not None else broker.ledger.run.version
        unproven = servers.distrust_unproven(broker.fleet, broker.ledger, version)
        begun = msgspec.structs.replace(
            decision,
            tickets=(*decision.tickets, *unproven.tickets),
            servers=unproven.servers,
            forgotten=evaluations.begin(broker.ledger, message),
        )
        await broker.commit(begun)
        broker.early_failures.begin(broker.ledger.ever_accepted)
    broker.observations.session_began(broker.now)


async def ask_for_evaluation(broker: Broker, message: EvaluationRequest) -> list[Evaluation]:
    """Open an evaluation unless its step has one. Returns all that are open or remembered.

    Raises:
        Refusal: EVALUATIONS_OPEN if too many are open.
    """
    async with broker.lock:
        _check_session(broker, message.session)
        await broker.commit(evaluations.ask(broker.ledger, message, broker.clock.wall()))
    return broker.evaluation_views()


async def read_evaluations(broker: Broker, wait_s: float) -> list[Evaluation]:
    """Return the open evaluations and the newest of those that have ended, in the order of their requests.

    Args:
        wait_s: While an evaluation is open, wait up to this many seconds for one to end.
    """
    ended = broker.evaluations_ended.listen()
    if wait_s > 0 and broker.ledger.evaluations.open and not broker.closing:
        await wait(ended, min(wait_s, MAX_WAIT_S))
    return broker.evaluation_views()


async def lease(broker: Broker, request: LeaseRequest, has_left: Callable[[], Awaitable[bool]]) -> LeaseReply:
    """Wait for groups and lease them.

    Args:
        has_left: Tells whether the caller has hung up. No new groups are leased to one that has.

    Returns:
        Groups as soon as there are any, or groups that must not be trained; neither after `request.wait_s`.

    Raises:
        Refusal: SESSION_SUPERSEDED; GAVE_UP once the run is given up.
    """
    ledger, waits = broker.ledger, broker.observations.waits
    deadline = broker.now + min(request.wait_s, MAX_WAIT_S)
    while True:
        groups_came = broker.groups_came.listen()
        async with broker.lock:
            _check_session(broker, request.session)
            broker.early_failures.check_not_given_up()
            ledger.renew_lease(request.lease_id, broker.now)
            lost = leases.undelivered(ledger, request.lease_id, request.have)
            more = ledger.count(TicketState.READY) > 0 and not broker.closing
            if lost or (more and not await has_left()):
                wanted = 0 if lost else max(0, request.max_groups)
                await broker.commit(leases.lease(ledger, broker.fleet, request.lease_id, wanted, request.have))
            records = leases.within_bytes(leases.undelivered(ledger, request.lease_id, request.have), MAX_LEASE_BYTES)
            revoked = leases.revoked(ledger, broker.fleet, request.lease_id, request.have)
            if records or revoked:
                waits.end(FEEDER)
                payloads = await broker.call(broker.store.payloads, [record.id for record in records])
                return _lease_reply(broker, request.lease_id, records, payloads, revoked)
        waits.begin(FEEDER, "groups", broker.now, until=broker.now + 2 * MAX_WAIT_S)
        if broker.closing or not await wait(groups_came, deadline - broker.now):
            return _lease_reply(broker, request.lease_id, [], {}, {})


async def acknowledge(broker: Broker, lease_id: str, message: LeaseAck) -> RunPosition:
    """End groups as trained or dropped; a new step raises the policy's version. Renews the lease.

    Args:
        message: Names groups of any of this session's leases.

    Raises:
        Refusal: STEP_MISSING, VERSION_CONFLICT, NOT_LEASED or ACK_AMBIGUOUS.
    """
    async with broker.lock:
        _check_session(broker, message.session)
        named = (*message.trained, *message.dropped)
        ended = [ticket_id for ticket_id in named if broker.ledger.get(ticket_id) is None]
        version = broker.ledger.run.version
        decision = leases.ack(broker.ledger, broker.fleet, message, await broker.call(broker.store.records, ended))
        await broker.record(lease_id, decision)
        await broker.commit(decision)
        broker.ledger.renew_lease(lease_id, broker.now)
        stepped = broker.ledger.run.version > version
        facts = broker.observations.acknowledged(decision.tickets, message.report, stepped, broker.now)
        if facts is not None:
            broker.admission.observe_step(facts)
            broker.room_came.notify()  # the depth may have grown after the commit woke the workers
    return broker.position()


def renew_lease(broker: Broker, lease_id: str, message: LeaseRenewal) -> LeaseRenewed:
    """Renew a lease. Returns which of the groups in `message.have` must not be trained.

    Raises:
        Refusal: LEASE_LAPSED if the lease has expired, since its groups may be leased anew.
    """
    _check_session(broker, message.session)
    leases.check_renewal(broker.ledger, lease_id)
    broker.ledger.renew_lease(lease_id, broker.now)
    return LeaseRenewed(leases.revoked(broker.ledger, broker.fleet, lease_id, message.have))


async def release_lease(broker: Broker, lease_id: str, message: LeaseRenewal) -> None:
    """Return a lease's groups untrained."""
    async with broker.lock:
        _check_session(broker, message.session)
        await broker.commit(leases.release(broker.ledger, lease_id))


async def put_server(broker: Broker, change: ServerChange) -> Server | None:
    """Register a server or change its state. Only the newest learner may prove one.

    Returns:
        The server as it is now; None if it was removed meanwhile.

    Raises:
        Refusal: SERVER_MISMATCH for a name or URL that cannot be used; TRANSITION_FORBIDDEN.
    """
    server = change.server
    try:
        check_name(server.name)
        server.url = normal_url(server.url)
    except ValueError as error:
        raise Refusal(reasons.SERVER_MISMATCH, str(error)) from None
    async with broker.lock:
        if change.session is None:
            servers.check_unfenced(broker.fleet, server)
        else:
            _check_session(broker, change.session)
        await broker.commit(servers.put(broker.fleet, broker.ledger, server, broker.clock.wall()))
    _expect_steps(broker)
    return broker.fleet.get(server.name)


async def remove_server(broker: Broker, name: str, now: bool) -> list[Server]:
    """Let a server drain, or end it at once where `now`. Returns the servers that are registered then.

    Raises:
        Refusal: SERVER_UNKNOWN.
    """
    async with broker.lock:
        await broker.commit(servers.drain(broker.fleet, broker.ledger, name, broker.clock.wall()))
        if now:
            await broker.commit(servers.remove(broker.fleet, broker.ledger, [name]))
    await broker.remove_drained()
    return broker.fleet.servers


async def finish(broker: Broker, message: FinishRun) -> RunPosition:
    """End the run: outstanding tickets and groups are dropped, and workers are told."""
    async with broker.lock:
        _check_session(broker, message.session)
        ended = evaluations.finish(broker.ledger, broker.fleet, broker.clock.wall())
        await broker.commit(msgspec.structs.replace(leases.finish(broker.ledger), evaluations=ended))
    broker.observations.waits.end(LEARNER)
    return broker.position()


def _check_session(broker: Broker, session: int) -> None:
    """Refuse any but the newest session (SESSION_SUPERSEDED); note that the learner is alive."""
    leases.check_session(broker.ledger, session)
    broker.observations.learner_seen(broker.now)
    _expect_steps(broker)


def _expect_steps(broker: Broker) -> None:
    """Let the stall alarm expect a step once there are a learner and a serving server, even if no worker ever comes."""
    seen = broker.observations
    if seen.learner_seen_s_ago(broker.now) is not None and broker.fleet.served_version is not None:
        seen.progress.expect_steps(broker.now)


def _lease_reply(
    broker: Broker,
    lease_id: str,
    records: Sequence[TicketRecord],
    payloads: dict[str, bytes],
    revoked: dict[str, str],
) -> LeaseReply:
    return LeaseReply(
        lease_id=lease_id,
        groups=[msgspec.Raw(payloads[record.id]) for record in records],
        version_at_arrival=[record.arrival_version for record in records],
        expires_in_s=broker.config.queue.lease_timeout_s,
        revoked=revoked,
    )
