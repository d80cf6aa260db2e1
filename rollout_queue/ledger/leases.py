"""Decisions on sessions and leases: begin, lease, acknowledge, checkpoint, finish. Pure: ledger in, decision out.

Only the newest session counts: a learner that was taken for dead and comes back cannot train a group that its successor
holds. Versions grow by one a step and never go back, across resumes too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.messages import BeginSession, LeaseAck, SessionStart
from slipstream.protocol.versions import within_staleness
from slipstream.rollout_queue.ledger import tickets
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import OUTSTANDING, Decision, Refusal, RunState, TicketRecord, TicketState
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry

# The newest indices keep their tickets one by one for `slipstream ledger`; older ones become sums.
INDICES_KEPT = 100_000

# Session starts that are remembered; a checkpoint from before them is taken as it is.
_MAX_SESSIONS = 64

# No run gets there, and beyond it the store could soon not hold the numbers.
_MAX_NUMBER = 2**53


def check_session(ledger: Ledger, session: int) -> None:
    """Refuse any but the newest learner session (SESSION_SUPERSEDED)."""
    if session != ledger.run.session or session == 0:
        raise Refusal(
            reasons.SESSION_SUPERSEDED,
            f"learner session {session} is not the current one, {ledger.run.session}: another learner has begun; end "
            f"this one",
        )


def lease(ledger: Ledger, fleet: ServerRegistry, lease_id: str, max_groups: int, have: Sequence[str] = ()) -> Decision:
    """Lease up to `max_groups` ready groups, those with the oldest tokens first: they are the next to grow over-age.

    Groups that the learner still has (`have`) after its lease expired are leased again besides. Groups tainted by a
    failed proof that would be leased are dropped instead, and those whose proof is still to come wait (I5).
    """
    held = [record for name in dict.fromkeys(have) if (record := ledger.get(name, TicketState.READY)) is not None]
    at_hand = [*held, *undelivered(ledger, lease_id, have)]
    chosen, met = ledger.ready.choose(fleet, max_groups, {record.id for record in held})
    tainted = {record.id: record for record in at_hand if fleet.distrusted(record.group, record.serial) is not None}
    chosen += [record for record in held if record.id not in tainted and fleet.unproven(record.group) is None]
    dropped = tickets.drop([*met, *tainted.values()], reasons.UNVERIFIED_SERVER)
    return Decision((*(record.to(TicketState.LEASED, lease_id=lease_id) for record in chosen), *dropped))


def undelivered(ledger: Ledger, lease_id: str, have: Sequence[str]) -> list[TicketRecord]:
    """Return the lease's groups that the learner does not have, since an answer was lost."""
    held = set(have)
    return [record for record in ledger.leased(lease_id) if record.id not in held]


def within_bytes(records: Sequence[TicketRecord], max_bytes: int) -> Sequence[TicketRecord]:
    """Return the first groups, at least one, whose bodies have at most `max_bytes` together."""
    totals = list(accumulate(record.group.bytes for record in records))
    return records[: max(1, bisect_right(totals, max_bytes))]


def revoked(ledger: Ledger, fleet: ServerRegistry, lease_id: str, have: Sequence[str]) -> dict[str, str]:
    """Return the learner's groups that it must not train, each with its reason: tainted by a failed proof (I5), or the
    lease expired and the group went elsewhere."""
    found = {}
    for ticket_id in have:
        record = ledger.get(ticket_id, TicketState.LEASED)
        if record is None or record.lease_id != lease_id:
            found[ticket_id] = reasons.LEASE_LAPSED
        elif fleet.distrusted(record.group, record.serial) is not None:
            found[ticket_id] = reasons.UNVERIFIED_SERVER
    return found


def check_renewal(ledger: Ledger, lease_id: str) -> None:
    """Refuse to renew a lease that holds nothing (LEASE_LAPSED): it expired, and its groups may be leased again."""
    if not ledger.leased(lease_id):
        raise Refusal(
            reasons.LEASE_LAPSED,
            f"lease {lease_id} was not renewed for queue.lease_timeout_s = {ledger.config.queue.lease_timeout_s:.0f} s "
            f"and its groups went back: drop what is left of it",
        )


def release(ledger: Ledger, lease_id: str) -> Decision:
    """Return a lease's groups untrained."""
    return Decision(tuple(record.to(TicketState.READY, lease_id=None) for record in ledger.leased(lease_id)))


def ack(ledger: Ledger, fleet: ServerRegistry, message: LeaseAck, ended: dict[str, TicketRecord]) -> Decision:
    """Record the groups that a step trained and those that were dropped. Acks may be split, and repeated.

    A group whose server failed its proof while the step was made is trained all the same, and recorded with that
    reason. The row of a group that is over-age because a resume raised the version is issued again, once.

    Args:
        ended: Records of those named tickets that the ledger no longer holds.

    Raises:
        Refusal: A step that does not follow (STEP_MISSING, VERSION_CONFLICT), or a ticket that is not the learner's
            (NOT_LEASED, ACK_AMBIGUOUS).
    """
    run = ledger.run
    if message.trained or message.step is not None:
        run = _advance(run, message)
    records = []
    for ticket_id in message.trained:
        record = ledger.get(ticket_id) or ended.get(ticket_id)
        if record is not None and record.state in (TicketState.READY, TicketState.LEASED):
            # An expired lease leaves its groups READY. The step was made all the same, so it is recorded.
            why = reasons.UNVERIFIED_SERVER if fleet.distrusted(record.group, record.serial) is not None else None
            records.append(
                record.to(TicketState.TRAINED, step=run.step, trained_version=run.version, lease_id=None, reason=why)
            )
        elif (
            record is None
            or record.state not in (TicketState.TRAINED, TicketState.FORGOTTEN)
            or (record.step, record.trained_version) != (message.step, message.version)
        ):
            raise _not_leased(ticket_id, record, "trained")
    labels: set[str] = set()
    for ticket_id, reason in message.dropped.items():
        record = ledger.get(ticket_id) or ended.get(ticket_id)
        if record is not None and record.state in (TicketState.READY, TicketState.LEASED):
            if _aged_by_resume(ledger, record, reason):
                records.append(record.to(TicketState.REISSUED, reason=reasons.ROLLED_BACK, lease_id=None))
                continue
            labels.add(label := ledger.label(reason, labels))
            records.extend(tickets.drop([record], label))
        elif not (ledger.was_pruned(ticket_id) if record is None else _was_dropped(record, reason)):
            raise _not_leased(ticket_id, record, "dropped")
    if len({record.id for record in records}) < len(records):
        raise Refusal(
            reasons.ACK_AMBIGUOUS, "a ticket is named twice in one ack: name each once, as trained or dropped"
        )
    if message.report is not None:
        run = msgspec.structs.replace(run, staleness_max=max(run.staleness_max, message.report.staleness_max))
    return Decision(tuple(records), run if run != ledger.run else None)


def _require_no_other(ledger: Ledger, message: BeginSession) -> None:
    """Refuse a learner that has looked whether it is alone before another one began. One that asks again is the same
    process."""
    run, other = ledger.run, ledger.run.learner
    if message.after is None or message.after == run.session or (other is not None and other == message.process):
        return
    who = "another learner" if other is None else f"the learner of process {other.pid} on {other.host}"
    raise Refusal(
        reasons.SESSION_SUPERSEDED,
        f"{who} has begun a session of this run while this one started, and is left alone: stop it first, or take the "
        f"run from it with --resume --take-over",
    )


def begin(ledger: Ledger, message: BeginSession, forgotten: Sequence[TicketRecord]) -> Decision:
    """Start a learner session, fresh or from a checkpoint made after `message.step` steps.

    What was trained after that step comes back, so that I1 holds on the time line that survives: as groups if they are
    young enough and there is room, else as rows to issue again. So do rows of groups sampled by weights too many steps
    ahead of the checkpoint: their versions would make them look young (I2).

    Args:
        forgotten: Tickets trained after that step whose payloads are gone.

    Raises:
        Refusal: The start does not fit the run (RUN_EXISTS, STEP_UNKNOWN, OUT_OF_RANGE), or another process has begun a
            session meanwhile (SESSION_SUPERSEDED).
    """
    run = ledger.run
    _require_no_other(ledger, message)
    version, step = _first_version(ledger, message), message.step
    limits = ledger.config.queue
    given_up = (message.version + limits.max_staleness + 1, version)
    held = [*ledger.tickets(TicketState.READY), *ledger.tickets(TicketState.LEASED)]
    ahead = {record.id: record for record in held if record.group.sampled_within(*given_up)}
    records = [record.to(TicketState.REISSUED, reason=reasons.ROLLED_BACK, lease_id=None) for record in ahead.values()]
    leased = ledger.tickets(TicketState.LEASED)
    records += [record.to(TicketState.READY, lease_id=None) for record in leased if record.id not in ahead]
    groups = ledger.outstanding - len(ahead)
    size = ledger.bytes - sum(record.group.bytes for record in ahead.values())
    undone = [record for record in ledger.tickets(TicketState.TRAINED) if (record.step or 0) > step]
    for record in sorted(undone, key=lambda r: (-r.group.oldest_version, r.index)):
        young = within_staleness(version, record.group.oldest_version, limits.max_staleness)
        young = young and not record.group.sampled_within(*given_up)
        fits = groups < limits.capacity_groups and size + record.group.bytes <= limits.capacity_bytes
        if young and fits:
            groups, size = groups + 1, size + record.group.bytes
            records.append(record.to(TicketState.READY, step=None, trained_version=None, reason=None))
        else:
            records.append(record.to(TicketState.REISSUED, reason=reasons.ROLLED_BACK))
    records += [record.to(TicketState.REISSUED, reason=reasons.ROLLED_BACK) for record in forgotten]
    survive = [start for start in run.sessions if start.step < step]
    return Decision(
        tuple(records),
        msgspec.structs.replace(
            run,
            version=version,
            step=step,
            total_steps=message.total_steps,
            session=run.session + 1,
            checkpoint_step=message.step if message.resume else None,
            checkpoints=tuple(kept for kept in run.checkpoints if kept <= step),
            finished=run.finished and message.total_steps <= step,
            declared=message.fingerprint,
            vocabulary=message.vocabulary,
            sessions=(*survive[-_MAX_SESSIONS:], SessionStart(step, version)),
            given_up=given_up if message.resume else (0, 0),
            learner=message.process,
        ),
    )


def kept_checkpoints(ledger: Ledger, step: int) -> tuple[int, ...]:
    """Return the steps of the checkpoints that are kept once there is one of `step`, oldest first."""
    return tuple(sorted({*ledger.run.checkpoints, step}))[-ledger.config.learner.keep_checkpoints :]


def checkpointed(ledger: Ledger, step: int, first_forgotten: int | None, indices_kept: int = INDICES_KEPT) -> Decision:
    """Record a checkpoint: the payloads of what was trained up to its step are no longer needed.

    Tickets with an index below all that a kept checkpoint needs become sums, except the newest `indices_kept`.

    Args:
        step: Step of the checkpoint.
        first_forgotten: Lowest index among forgotten tickets trained after the oldest of `kept_checkpoints`.

    Raises:
        Refusal: The run has not reached the step (STEP_UNKNOWN).
    """
    if step > ledger.run.step:
        raise Refusal(
            reasons.STEP_UNKNOWN, f"there can be no checkpoint of step {step}: the run is at step {ledger.run.step}"
        )
    done = [
        record.to(TicketState.FORGOTTEN) for record in ledger.tickets(TicketState.TRAINED) if (record.step or 0) <= step
    ]
    kept = kept_checkpoints(ledger, step)
    run = msgspec.structs.replace(
        ledger.run, checkpoint_step=max(step, ledger.run.checkpoint_step or 0), checkpoints=kept
    )
    needed = [ledger.first_needed(), ledger.next_index - indices_kept]
    below = min(needed if first_forgotten is None else [*needed, first_forgotten])
    if len(kept) == ledger.config.learner.keep_checkpoints and below > run.pruned_below:
        run = msgspec.structs.replace(run, pruned_below=below, pruned_step=kept[0])
    return Decision(tuple(done), run)


def finish(ledger: Ledger) -> Decision:
    """End the run: drop what is outstanding or waits to be issued again. Tickets are refused from now on."""
    left = [record for state in OUTSTANDING for record in ledger.tickets(state)]
    left += ledger.to_reissue.values()
    return Decision(tickets.drop(left, reasons.RUN_FINISHED), msgspec.structs.replace(ledger.run, finished=True))


def _aged_by_resume(ledger: Ledger, record: TicketRecord, reason: str) -> bool:
    """Tell whether a group is over-age only because a resume raised the version after its ticket was issued."""
    sessions = ledger.run.sessions
    return reason == reasons.OVERAGE and bool(sessions) and record.version < sessions[-1].version


def _was_dropped(record: TicketRecord, reason: str) -> bool:
    """Tell whether an ended ticket shows that this drop was acknowledged before."""
    again = reason == reasons.OVERAGE and record.reason == reasons.ROLLED_BACK and record.was_accepted
    return record.state is TicketState.DROPPED or (record.state is TicketState.REISSUED and again)


def _advance(run: RunState, message: LeaseAck) -> RunState:
    if message.step is None or message.version is None:
        raise Refusal(reasons.STEP_MISSING, "an ack of trained tickets must carry the step and the version they made")
    if (message.step, message.version) == (run.step, run.version):
        return run
    if (message.step, message.version) != (run.step + 1, run.version + 1):
        raise Refusal(
            reasons.VERSION_CONFLICT,
            f"step {message.step}, version {message.version} does not follow step {run.step}, version {run.version}: "
            f"each step adds one to both; resume the learner from its newest checkpoint",
        )
    return msgspec.structs.replace(run, step=message.step, version=message.version)


def _first_version(ledger: Ledger, message: BeginSession) -> int:
    """Return the version that a session starts at: 0, or one above every version before it."""
    run = ledger.run
    for name, number in (("step", message.step), ("version", max(message.version, run.version))):
        if number >= _MAX_NUMBER:
            raise Refusal(
                reasons.OUT_OF_RANGE,
                f"{name} {number} is beyond the highest that a run may start at, {_MAX_NUMBER - 1}: resume from a "
                f"checkpoint that is whole, or choose a new run.name",
            )
    if not message.resume:
        if ledger.ever_trained:
            raise Refusal(
                reasons.RUN_EXISTS,
                f"run {ledger.config.run.name!r} has trained {run.step} steps already: continue it with --resume, or "
                f"choose a new run.name",
            )
        if message.step != 0:
            raise Refusal(reasons.STEP_UNKNOWN, f"a fresh run starts at step 0, not {message.step}: use --resume")
        return 0
    if run.session == 0:
        # The queue lost its store. No group of before can come in, since no ticket of before is known here.
        return message.version + 1
    if message.step > run.step:
        raise Refusal(
            reasons.STEP_UNKNOWN,
            f"the checkpoint is of step {message.step} but the queue knows steps up to {run.step} only: is it another "
            f"run's? To start with an empty ledger, stop the queue and move its store out of {ledger.config.run_dir}",
        )
    if message.step < run.pruned_step:
        raise Refusal(
            reasons.STEP_UNKNOWN,
            f"the checkpoint is of step {message.step}, but the ledger has forgotten what was trained before step "
            f"{run.pruned_step}, the oldest of the learner.keep_checkpoints = "
            f"{ledger.config.learner.keep_checkpoints} newest checkpoints: resume from one of those",
        )
    return max(run.version, message.version) + 1


def _not_leased(ticket_id: str, record: TicketRecord | None, outcome: str) -> Refusal:
    if record is None:
        where = "never issued in this run"
    else:
        where = f"{record.state} at step {record.step}" if record.step is not None else str(record.state)
    return Refusal(reasons.NOT_LEASED, f"ticket {ticket_id} cannot be {outcome}: it is {where}")
