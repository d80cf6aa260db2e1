"""Decisions on tickets: issue, submit, fail, expire. Pure: ledger in, decision out.

A ticket that fails ends in one of two ways: its row is issued again under the next attempt, or it is dropped for a
reason (I1). This holds for tickets of evaluations as for those of the training. `evaluations` has what differs: how
they are issued, and what is kept of an accepted group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slipstream.protocol import reasons
from slipstream.protocol.messages import Ticket
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.records import (
    EVAL_TICKET,
    Decision,
    GroupFacts,
    Refusal,
    RowOutcome,
    RowRecord,
    TicketRecord,
    TicketState,
)

# Every store holds integers of 64 bits.
_MAX_STORED = 2**63

# Not counted as a failed attempt: a worker that ends has not tried the row.
_NO_ATTEMPT = frozenset({reasons.failed(reasons.WORKER_STOPPED), reasons.FINGERPRINT})


def issue(ledger: Ledger, worker_id: str, count: int) -> Decision:
    """Issue `count` training tickets to a worker: first rows to issue again, lowest index first, then new rows.

    With `task.order = "learnable"` a new index gets its row here. It keeps that row, however often it is issued again.
    """
    version, serial, rows = ledger.run.version, ledger.issued, ledger.rows
    again = ledger.next_to_reissue(count)
    records = [
        TicketRecord(
            index=ended.index,
            attempt=ended.attempt + 1,
            serial=serial + position,
            worker_id=worker_id,
            version=version,
            failures=ended.failures,
            row=None if rows is None else rows.row_of(ended.index, ended.row),
        )
        for position, ended in enumerate(again)
    ]
    records += [
        TicketRecord(
            index=(index := ledger.next_index + offset),
            attempt=0,
            serial=serial + len(again) + offset,
            worker_id=worker_id,
            version=version,
            row=None if rows is None else rows.row_of(index),
        )
        for offset in range(count - len(again))
    ]
    return Decision(tuple(records))


def undelivered(ledger: Ledger, worker_id: str, have: Sequence[str]) -> list[TicketRecord]:
    """Return the worker's tickets that it does not have: an answer was lost, or it was restarted under its name."""
    held = set(have)
    return [record for record in ledger.held_by(worker_id) if record.id not in held]


def message(ledger: Ledger, record: TicketRecord) -> Ticket:
    """Return the ticket as a message to the worker."""
    evaluation = ledger.evaluations.record_of(record)
    return Ticket(
        id=record.id,
        index=record.index,
        group_size=ledger.config.rollout.group_size if evaluation is None else evaluation.group_size,
        seed=ledger.config.run.seed,
        version=record.version,
        expires_in_s=ledger.config.queue.ticket_timeout_s,
        kind=record.kind,
        step=ledger.run.step,
        temperature=None if evaluation is None else evaluation.temperature,
        row=record.row,
    )


def submit(ledger: Ledger, record: TicketRecord, group: GroupFacts, outcome: RowOutcome | None = None) -> Decision:
    """Accept a valid group to train on.

    The estimate of its row takes in its `outcome`. What a later resume rolls back stays in the estimate: the group was
    sampled, and the row comes again.

    A group sampled by weights of steps that a resume gave up, too far ahead of those that continued, is not accepted:
    its row is issued again (I2). Payloads of trained groups that wait for a checkpoint make room, oldest first: a
    resume from before their step then issues their rows again.

    Raises:
        Refusal: FULL while the group's bytes do not fit (I3).
    """
    if group.sampled_within(*ledger.run.given_up):
        return Decision((record.to(TicketState.REISSUED, reason=reasons.ROLLED_BACK),))
    limit = ledger.config.queue.capacity_bytes
    if ledger.bytes + group.bytes > limit:
        raise Refusal(
            reasons.FULL,
            f"{ledger.bytes} of {limit} bytes are taken and the group has {group.bytes}: wait for the learner, or "
            f"raise queue.capacity_bytes",
            retry_after_s=1.0,
        )
    let_go, kept = [], ledger.kept_bytes + group.bytes
    for trained in ledger.tickets(TicketState.TRAINED):
        if kept <= limit:
            break
        kept -= trained.group.bytes
        let_go.append(trained.to(TicketState.FORGOTTEN))
    ready = record.to(TicketState.READY, arrival_version=ledger.run.version, group=group)
    estimates: tuple[RowRecord, ...] = ()
    if ledger.rows is not None and record.row is not None and outcome is not None:
        estimates = (ledger.rows.after(record.row, outcome),)
    return Decision((ready, *let_go), rows=estimates)


def check_accepted(ledger: Ledger, ticket_id: str, record: TicketRecord | None) -> None:
    """Refuse a group whose ticket is not with a worker, unless the ticket's group was accepted before.

    Args:
        record: The ticket's record; None if there is none.

    Raises:
        Refusal: TICKET_UNKNOWN, TICKET_ENDED.
    """
    if record is None and ledger.evaluations.was_accepted(ticket_id):
        return
    if record is None and ticket_id.startswith(EVAL_TICKET):
        raise Refusal(
            reasons.TICKET_ENDED, f"ticket {ticket_id} of an evaluation is not out any more: it or the evaluation ended"
        )
    if record is None and ledger.was_pruned(ticket_id):
        raise Refusal(reasons.TICKET_ENDED, f"ticket {ticket_id} ended before the oldest checkpoint that is kept")
    if record is None:
        raise Refusal(reasons.TICKET_UNKNOWN, f"ticket {ticket_id} was never issued in this run")
    if not record.was_accepted:
        raise Refusal(reasons.TICKET_ENDED, f"ticket {ticket_id} was {record.state}: {record.reason}")


def fail(ledger: Ledger, record: TicketRecord, reason: str, retryable: bool) -> Decision:
    """End an issued ticket that yielded no group. If `retryable`, its row is issued again while attempts are left."""
    return Decision((_failed(ledger, record, reason, retryable),))


def lost(ledger: Ledger, records: Iterable[TicketRecord]) -> Decision:
    """Issue the rows of groups that the store has lost or damaged again, while attempts are left."""
    return Decision(tuple(_failed(ledger, record, reasons.DAMAGED, retryable=True) for record in records))


def give_back(ledger: Ledger, worker_id: str) -> Decision:
    """Issue the rows of a refused worker's tickets again, without counting an attempt."""
    held = ledger.held_by(worker_id)
    return Decision(tuple(_failed(ledger, record, reasons.FINGERPRINT, retryable=True) for record in held))


def expire(ledger: Ledger, now: float) -> Decision:
    """End tickets, and return leased groups to the queue, whose holders were not heard from in time."""
    return Decision(
        tuple(
            _failed(ledger, record, _why_expired(ledger, record, now), retryable=True)
            if record.state is TicketState.ISSUED
            else record.to(TicketState.READY, lease_id=None)
            for record in ledger.expired(now)
        )
    )


def drop(records: Iterable[TicketRecord], reason: str) -> tuple[TicketRecord, ...]:
    return tuple(record.to(TicketState.DROPPED, reason=reason, lease_id=None) for record in records)


def check_range(decision: Decision) -> None:
    """Refuse a decision with a number that no store can hold (OUT_OF_RANGE)."""
    for of in decision.tickets:
        largest = max(of.index, of.version, of.arrival_version, of.group.tokens, of.step or 0, of.trained_version or 0)
        if largest >= _MAX_STORED:
            raise Refusal(reasons.OUT_OF_RANGE, f"ticket {of.id}: {largest} is beyond what the store can hold")


def _failed(ledger: Ledger, record: TicketRecord, reason: str, retryable: bool) -> TicketRecord:
    failures = record.failures + (reason not in _NO_ATTEMPT)
    again = retryable and failures < ledger.config.queue.ticket_attempts
    state = TicketState.REISSUED if again else TicketState.DROPPED
    known = record.evaluation is None or reasons.is_ours(reason)
    reason = ledger.label(reason if known else reasons.OTHER)
    return record.to(state, reason=reason, failures=failures, lease_id=None)


def _why_expired(ledger: Ledger, record: TicketRecord, now: float) -> str:
    return reasons.OUTLIVED if ledger.has_outlived(record.id, now) else reasons.EXPIRED
