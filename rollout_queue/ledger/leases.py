"""Decisions of the learner's side: lease, acknowledge, resume, checkpoint, finish. Pure: ledger in, decision out.

Only the newest session is listened to: a learner that was declared dead and comes back cannot train a group that its
successor holds. Versions go up by one a step and never go back, over resumes too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from protocol.messages import BeginSession, LeaseAck
from rollout_queue.ledger import tickets
from rollout_queue.ledger.ledger import Ledger
from rollout_queue.ledger.records import OUTSTANDING, Decision, RunState, TicketRecord, TicketState
from rollout_queue.ledger.refusal import Refusal

RUN_FINISHED = "run_finished"
ROLLED_BACK = "rolled_back"


class StartingPoint(msgspec.Struct, frozen=True):
    """Where a session starts."""

    version: int
    step: int


def check_session(ledger: Ledger, session: int) -> None:
    """Raises a 409 `Refusal` for any but the newest learner session."""
    if session != ledger.run.session or session == 0:
        raise Refusal(
            409,
            "session_superseded",
            f"learner session {session} is not the current one, {ledger.run.session}: another learner has begun; end "
            f"this one",
        )


def lease(ledger: Ledger, lease_id: str, max_groups: int) -> Decision:
    """Up to `max_groups` ready groups: oldest version first, since they are the next to grow over-age."""
    chosen = heapq.nsmallest(max_groups, ledger.tickets(TicketState.READY), key=lambda r: (r.oldest_version, r.index))
    return Decision(tuple(record.to(TicketState.LEASED, lease_id=lease_id) for record in chosen))


def release(ledger: Ledger, lease_id: str) -> Decision:
    """Return a lease's groups untrained."""
    return Decision(tuple(record.to(TicketState.READY, lease_id=None) for record in ledger.leased(lease_id)))


def ack(ledger: Ledger, message: LeaseAck, ended: dict[str, TicketRecord]) -> Decision:
    """Record what a step trained and what was dropped; one step may take several acks, and any may be repeated.

    `ended`: the records of those named tickets that the ledger no longer holds.
    Raises 409 `Refusal`s: a version or step that does not follow, a ticket that is not the learner's.
    """
    run = ledger.run
    if message.trained or message.step is not None:
        run = _advance(run, message)
    records = []
    for ticket_id in message.trained:
        record = ledger.get(ticket_id) or ended.get(ticket_id)
        if record is not None and record.state in (TicketState.READY, TicketState.LEASED):
            # A lapsed lease leaves its groups READY. The step is made, so it is recorded all the same.
            records.append(record.to(TicketState.TRAINED, step=run.step, trained_version=run.version, lease_id=None))
        elif (
            record is None
            or record.state not in (TicketState.TRAINED, TicketState.FORGOTTEN)
            or (record.step, record.trained_version) != (message.step, message.version)
        ):
            raise _not_leased(ticket_id, record, "trained")
    for ticket_id, reason in message.dropped.items():
        record = ledger.get(ticket_id) or ended.get(ticket_id)
        if record is not None and record.state in (TicketState.READY, TicketState.LEASED):
            records.extend(tickets.drop([record], reason))
        elif record is None or record.state is not TicketState.DROPPED:
            raise _not_leased(ticket_id, record, "dropped")
    if len({record.id for record in records}) < len(records):
        raise Refusal(409, "ack_ambiguous", "a ticket is named twice in one ack: name each once, as trained or dropped")
    if message.report is not None:
        run = msgspec.structs.replace(run, staleness_max=max(run.staleness_max, message.report.staleness_max))
    return Decision(tuple(records), run if run != ledger.run else None)


def begin(ledger: Ledger, message: BeginSession, forgotten: Sequence[TicketRecord]) -> Decision:
    """Start a learner session, fresh or from a checkpoint made after `message.step` steps.

    `forgotten`: tickets trained after that step whose payload is gone. What was trained after it comes back, so that
    I1 holds on the time line that survives: as groups where young enough and where there is room, else as rows.
    """
    run = ledger.run
    start = _start(ledger, message)
    version, step = start.version, start.step
    records = [record.to(TicketState.READY, lease_id=None) for record in ledger.tickets(TicketState.LEASED)]
    groups, size = ledger.outstanding, ledger.bytes
    undone = [record for record in ledger.tickets(TicketState.TRAINED) if (record.step or 0) > step]
    for record in sorted(undone, key=lambda r: (-r.oldest_version, r.index)):
        young = version - record.oldest_version <= ledger.config.queue.max_staleness
        fits = (
            groups < ledger.config.queue.capacity_groups and size + record.bytes <= ledger.config.queue.capacity_bytes
        )
        if young and fits:
            groups, size = groups + 1, size + record.bytes
            records.append(record.to(TicketState.READY, step=None, trained_version=None))
        else:
            records.append(record.to(TicketState.REISSUED, reason=ROLLED_BACK))
    records += [record.to(TicketState.REISSUED, reason=ROLLED_BACK) for record in forgotten]
    return Decision(
        tuple(records),
        RunState(
            version=version,
            step=step,
            total_steps=message.total_steps,
            session=run.session + 1,
            checkpoint_step=message.step if message.resume else None,
            finished=run.finished and message.total_steps <= step,
            staleness_max=run.staleness_max,
        ),
    )


def checkpointed(ledger: Ledger, step: int) -> Decision:
    """A checkpoint of `step` exists: what was trained up to it cannot be needed again."""
    if step > ledger.run.step:
        raise Refusal(409, "step_unknown", f"a checkpoint of step {step} cannot be: the run is at {ledger.run.step}")
    done = [
        record.to(TicketState.FORGOTTEN) for record in ledger.tickets(TicketState.TRAINED) if (record.step or 0) <= step
    ]
    newest = max(step, ledger.run.checkpoint_step or 0)
    return Decision(tuple(done), msgspec.structs.replace(ledger.run, checkpoint_step=newest))


def finish(ledger: Ledger) -> Decision:
    """End the run: what is outstanding is dropped, and tickets are refused from now on."""
    left = [record for state in OUTSTANDING for record in ledger.tickets(state)]
    return Decision(tickets.drop(left, RUN_FINISHED), msgspec.structs.replace(ledger.run, finished=True))


def _advance(run: RunState, message: LeaseAck) -> RunState:
    if message.step is None or message.version is None:
        raise Refusal(409, "step_missing", "an ack with trained tickets must carry the step and version they made")
    if (message.step, message.version) == (run.step, run.version):
        return run
    if (message.step, message.version) != (run.step + 1, run.version + 1):
        raise Refusal(
            409,
            "version_conflict",
            f"step {message.step}, version {message.version} does not follow step {run.step}, version {run.version}: "
            f"each step adds one to both; resume the learner from its newest checkpoint",
        )
    return msgspec.structs.replace(run, step=message.step, version=message.version)


def _start(ledger: Ledger, message: BeginSession) -> StartingPoint:
    run = ledger.run
    if not message.resume:
        if ledger.ever_trained:
            raise Refusal(
                409,
                "run_exists",
                f"run {ledger.config.run.name!r} has trained {run.step} steps already: go on with it with --resume, or "
                f"choose a new run.name",
            )
        if message.step != 0:
            raise Refusal(409, "step_unknown", f"a fresh run starts at step 0, not {message.step}: use --resume")
        return StartingPoint(version=0, step=0)
    if run.session == 0:
        # The queue lost its file. No group of before can come in, since no ticket of before is known here.
        return StartingPoint(version=message.version + 1, step=message.step)
    if message.step > run.step:
        raise Refusal(
            409,
            "step_unknown",
            f"the checkpoint is of step {message.step} but the queue knows steps up to {run.step} only: is it another "
            f"run's? To start the queue's ledger anew, move {ledger.config.run_dir / 'queue.db'} away",
        )
    return StartingPoint(version=max(run.version, message.version) + 1, step=message.step)


def _not_leased(ticket_id: str, record: TicketRecord | None, outcome: str) -> Refusal:
    if record is None:
        return Refusal(409, "ticket_unknown", f"ticket {ticket_id} was never issued in this run")
    where = f"{record.state} at step {record.step}" if record.step is not None else str(record.state)
    return Refusal(409, "not_leased", f"ticket {ticket_id} cannot be {outcome}: it is {where}")
