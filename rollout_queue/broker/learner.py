"""Operations of the learner's side: sessions, leases, acknowledgements, evaluations, servers, the end of the run.

Each takes messages and returns messages, and knows nothing of HTTP. Where an operation decides, it looks and applies
within `async with broker.lock`, which it holds over its own reads of the store. It makes its answer at once, and gives
it once the store has what the answer tells. All but reads and the registration of a server are fenced: they refuse
every session but the newest (SESSION_SUPERSEDED).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.addresses import check_name, normal_url
from slipstream.protocol.messages import (
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
from slipstream.protocol.status import Evaluation, EvaluationRequest
from slipstream.rollout_queue.broker.broker import Broker
from slipstream.rollout_queue.broker.waiting import MAX_WAIT_S, wait
from slipstream.rollout_queue.ledger import evaluations, leases, servers, tickets
from slipstream.rollout_queue.ledger.records import Refusal, TicketRecord, TicketState
from slipstream.rollout_queue.observe.waits import FEEDER, LEARNER

logger = logging.getLogger(__name__)

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
                first = await broker.writer.read(broker.store.first_forgotten_after, oldest)
                broker.apply(leases.checkpointed(broker.ledger, message.step, first))
                broker.observations.symptoms.checkpoint_failure = None
        case _:
            _check_session(broker, message.session)
            broker.observations.learner_waits(message.what, broker.now)
    return await read_position(broker)


async def read_position(broker: Broker) -> RunPosition:
    """Return the position of the run."""
    position = broker.position()
    await broker.writer.newest
    return position


async def read_servers(broker: Broker) -> list[Server]:
    """Return the servers that are registered."""
    found = broker.fleet.servers
    await broker.writer.newest
    return found


async def _begin_session(broker: Broker, message: BeginSession) -> None:
    async with broker.lock:
        forgotten = await broker.writer.read(broker.store.forgotten_after, message.step) if message.resume else []
        decision = leases.begin(broker.ledger, message, forgotten)
        version = decision.run.version if decision.run is not None else broker.ledger.run.version
        unproven = servers.distrust_unproven(broker.fleet, broker.ledger, version)
        begun = msgspec.structs.replace(
            decision,
            tickets=(*decision.tickets, *unproven.tickets),
            servers=unproven.servers,
            forgotten=evaluations.begin(broker.ledger, message),
        )
        commit = broker.apply(begun)
        broker.early_failures.begin(broker.ledger.ever_accepted)
    await commit
    broker.admission.observe_session()
    broker.observations.session_began(broker.now, message.changed)


async def ask_for_evaluation(broker: Broker, message: EvaluationRequest) -> list[Evaluation]:
    """Open an evaluation unless its step has one. Returns all that are open or remembered.

    Raises:
        Refusal: EVALUATIONS_OPEN if too many are open.
    """
    async with broker.lock:
        _check_session(broker, message.session)
        broker.apply(evaluations.ask(broker.ledger, message, broker.clock.wall()))
    return await _read_evaluations(broker)


async def read_evaluations(broker: Broker, wait_s: float) -> list[Evaluation]:
    """Return the open evaluations and the newest of those that have ended, in the order of their requests.

    Args:
        wait_s: While an evaluation is open, wait up to this many seconds for one to end.

    Raises:
        Refusal: GAVE_UP to a wait once the run is given up.
    """
    ended = broker.evaluations_ended.listen()
    if wait_s > 0 and broker.ledger.evaluations.open and not broker.closing:
        broker.early_failures.check_not_given_up()
        await wait(ended, min(wait_s, MAX_WAIT_S))
        broker.early_failures.check_not_given_up()
    return await _read_evaluations(broker)


async def _read_evaluations(broker: Broker) -> list[Evaluation]:
    views = broker.evaluation_views()
    await broker.writer.newest
    return views


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
            commit = broker.writer.newest
            lost = leases.undelivered(ledger, request.lease_id, request.have)
            more = ledger.count(TicketState.READY) > 0 and not broker.closing
            if lost or (more and not await has_left()):
                wanted = 0 if lost else max(0, request.max_groups)
                commit = broker.apply(leases.lease(ledger, broker.fleet, request.lease_id, wanted, request.have))
            records = leases.within_bytes(leases.undelivered(ledger, request.lease_id, request.have), MAX_LEASE_BYTES)
            revoked = leases.revoked(ledger, broker.fleet, request.lease_id, request.have)
        await commit
        payloads = await _sound_payloads(broker, records)
        if payloads or revoked:
            waits.end(FEEDER)
            return _lease_reply(broker, request.lease_id, records, payloads, revoked)
        if records:
            continue
        waits.begin(FEEDER, "groups", broker.now, until=broker.now + 2 * MAX_WAIT_S)
        if broker.closing or not await wait(groups_came, deadline - broker.now):
            return _lease_reply(broker, request.lease_id, [], {}, {})


async def _sound_payloads(broker: Broker, records: Sequence[TicketRecord]) -> dict[str, bytes]:
    """Return the groups of leased tickets, by ticket id, as they were submitted.

    The row of a group that the store has lost or damaged is issued again, and people are told.
    """

    sound = {record.id: body for record in records if (body := broker.recent_payloads.get(record.id)) is not None}
    others = [record.id for record in records if record.id not in sound]

    def read() -> dict[str, bytes]:
        found = broker.store.payloads(others).items()
        return {name: body for name, payload in found if (body := payload.sound_body) is not None}

    if others:
        sound |= await broker.writer.read(read)
    if len(sound) < len(records):
        async with broker.lock:
            held = [broker.ledger.get(record.id, TicketState.LEASED) for record in records if record.id not in sound]
            # What ended while it was read is no damage.
            damaged = [record for record in held if record is not None]
            commit = broker.apply(tickets.lost(broker.ledger, damaged))
        await commit
        for record in damaged:
            text = (
                f"group {record.id} was changed or lost in the queue's store and is not trained on; its prompt is "
                f"sampled again, up to queue.ticket_attempts times. Check the disk under {broker.config.run_dir}"
            )
            logger.error("%s", text)
            broker.observations.notices.say(reasons.DAMAGED, text, broker.now, key=reasons.DAMAGED)
    return sound


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
        found = await broker.writer.read(broker.store.records, ended) if ended else {}
        decision = leases.ack(broker.ledger, broker.fleet, message, found)
        await broker.record(lease_id, decision)
        broker.apply(decision)
        broker.ledger.renew_lease(lease_id, broker.now)
        stepped = broker.ledger.run.version > version
        dropped = sum(record.state is not TicketState.TRAINED for record in decision.tickets)
        broker.admission.observe_ack(lease_id, dropped, stepped)
        facts = broker.observations.acknowledged(decision.tickets, message.report, stepped, broker.now)
        if facts is not None:
            broker.admission.observe_step(facts)
            broker.line.call_next()  # the depth may have grown
    return await read_position(broker)


async def renew_lease(broker: Broker, lease_id: str, message: LeaseRenewal) -> LeaseRenewed:
    """Renew a lease. Returns which of the groups in `message.have` must not be trained.

    Raises:
        Refusal: LEASE_LAPSED if the lease has expired, since its groups may be leased again.
    """
    if message.session == broker.ledger.run.session:
        broker.ledger.renew_lease(lease_id, broker.now)
    _check_session(broker, message.session)
    leases.check_renewal(broker.ledger, lease_id)
    renewed = LeaseRenewed(leases.revoked(broker.ledger, broker.fleet, lease_id, message.have))
    await broker.writer.newest
    return renewed


async def release_lease(broker: Broker, lease_id: str, message: LeaseRenewal) -> None:
    """Return a lease's groups untrained."""
    async with broker.lock:
        _check_session(broker, message.session)
        commit = broker.apply(leases.release(broker.ledger, lease_id))
    await commit


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
        commit = broker.apply(servers.put(broker.fleet, broker.ledger, server, broker.clock.wall()))
        now = broker.fleet.get(server.name)
    await commit
    _expect_steps(broker)
    return now


async def remove_server(broker: Broker, name: str, now: bool) -> list[Server]:
    """Let a server drain, or end it at once where `now`. Returns the servers that are registered then.

    One that has left already changes nothing: the call may be a repeat.

    Raises:
        Refusal: SERVER_UNKNOWN.
    """
    async with broker.lock:
        commit = broker.apply(servers.drain(broker.fleet, broker.ledger, name, broker.clock.wall()))
        if now:
            commit = broker.apply(servers.remove(broker.fleet, broker.ledger, [name]))
    await commit
    await broker.remove_drained()
    return await read_servers(broker)


async def finish(broker: Broker, message: FinishRun) -> RunPosition:
    """End the run: outstanding tickets and groups are dropped, and workers are told."""
    async with broker.lock:
        _check_session(broker, message.session)
        had_finished = broker.ledger.run.finished
        ended = evaluations.finish(broker.ledger, broker.fleet, broker.clock.wall())
        broker.apply(msgspec.structs.replace(leases.finish(broker.ledger), evaluations=ended))
    broker.observations.waits.end(LEARNER)
    position = await read_position(broker)
    if not had_finished:
        broker.log_finished()
    return position


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
        groups=[msgspec.Raw(payloads[record.id]) for record in records if record.id in payloads],
        version_at_arrival=[record.arrival_version for record in records if record.id in payloads],
        expires_in_s=broker.config.queue.lease_timeout_s,
        revoked=revoked,
    )
