"""Decisions on evaluations: ask, issue, submit, fail, expire. Pure: memory in, decision out.

A row of an evaluation is issued until a group of it is accepted, or its attempts are used up; then it counts as failed.
An evaluation ends when all of its rows have, or at its deadline, or with the run, whichever is first. A row that was
sampled between a swap and its proof is not at its end before the proof holds (I5): where it fails, the row is issued
again, and an evaluation that ends without it counts the row as failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from protocol import reasons
from protocol.config import RunConfig
from protocol.messages import BeginSession, Ticket
from protocol.status import Evaluation, EvaluationRequest
from rollout_queue.ledger.eval_ends import ended_record, with_ends, without_oldest
from rollout_queue.ledger.eval_proof import awaited_proof, without_unproven
from rollout_queue.ledger.evaluations import Evaluations, OpenEvaluation
from rollout_queue.ledger.fleet import Fleet
from rollout_queue.ledger.records import Decision, EvalChange, EvalRecord, EvalRow, EvalRowState, RowResult, RunState
from rollout_queue.ledger.refusal import Refusal

# More than this many would mean that none ever ends before the next two are due.
MOST_OPEN = 16
# Of one answer to a worker.
_MOST_TICKETS = 1024
_NO_ATTEMPT = frozenset({reasons.failed(reasons.WORKER_STOPPED), reasons.FINGERPRINT})


class Asking(msgspec.Struct, frozen=True):
    """A worker that asks for tickets: it has room for so many `episodes`, and may hold `most` of evaluations in all;
    one group it may always hold."""

    worker_id: str
    episodes: int
    most: int


def asking(config: RunConfig, run: RunState, worker_id: str, wanted: int, capacity: int) -> Asking:
    """A worker of `capacity` episodes asks for `wanted` tickets, which it counts as if all were the training's."""
    most = capacity if run.all_steps_made else int(config.eval.share * capacity)
    return Asking(worker_id, wanted * config.rollout.group_size, most)


def ask(evaluations: Evaluations, run: RunState, request: EvaluationRequest, wall_time: float) -> Decision:
    """Open an evaluation; nothing changes if its step has one. Refuses one more than MOST_OPEN (EVALUATIONS_OPEN)."""
    record = EvalRecord(
        number=run.evaluations,
        step=request.step,
        version=request.version,
        wanted=request.rows,
        group_size=request.group_size,
        temperature=request.temperature,
        timeout_s=request.timeout_s,
        asked_at=wall_time,
    )
    if any(known.step == record.step for known in evaluations.records):
        return Decision()
    if len(evaluations.open) >= MOST_OPEN:
        raise Refusal(
            reasons.EVALUATIONS_OPEN,
            f"{len(evaluations.open)} evaluations are open, the oldest of step {evaluations.open[0].record.step}: they "
            f"take longer than the steps between them; raise eval.every or eval.share, or lower eval.rows",
        )
    return Decision(
        run=msgspec.structs.replace(run, evaluations=run.evaluations + 1), evals=EvalChange(records=(record,))
    )


def issue(
    evaluations: Evaluations, run: RunState, served_version: int | None, serial: int, asking: Asking, wall_time: float
) -> EvalChange:
    """Tickets for a worker, of the oldest evaluation first; of each, rows that failed come first. `serial`: training
    tickets issued so far."""
    held = evaluations.episodes_of(evaluations.held_by(asking.worker_id))
    left = min(asking.episodes, asking.most - held)
    records: list[EvalRecord] = []
    issued: list[EvalRow] = []
    for of in evaluations.open:
        if waits_for(of.record, run, served_version) is not None:
            continue
        record = _sized(of.record, run)
        size = record.group_size
        for row in chain((of.again[number] for number in sorted(of.again)), _new_rows(record)):
            alone = held == 0 and not issued
            if (size > left and not alone) or len(issued) == _MOST_TICKETS:
                break
            left -= size
            issued.append(
                EvalRow(
                    evaluation=record.number,
                    index=row.index,
                    attempt=row.attempt + 1,
                    serial=serial,
                    worker_id=asking.worker_id,
                    version=run.version,
                    failures=row.failures,
                )
            )
            if row.index == record.next_row:
                record = msgspec.structs.replace(record, next_row=row.index + 1)
        if record.rows == 0:
            records.append(ended_record(OpenEvaluation(record), "complete", wall_time))
        elif record != of.record:
            records.append(record)
    return EvalChange(tuple(records), tuple(issued))


def waits_for(record: EvalRecord, run: RunState, served_version: int | None) -> str | None:
    """What keeps tickets of an open evaluation from being issued; None if nothing does."""
    if served_version is None:
        return "a server that serves"
    if served_version < record.version:
        return f"version {record.version} on every server that serves, the oldest has {served_version}"
    if record.rows is None and _rows_of_data(run) is None:
        return "a worker that has read the eval_dataset"
    return None


def views(evaluations: Evaluations, run: RunState, fleet: Fleet, wall_time: float) -> list[Evaluation]:
    """All of them as people see them, in the order in which they were asked for."""
    found = [(record.number, record.result) for record in evaluations.ended if record.result is not None]
    for of in evaluations.open:
        seconds = max(0.0, wall_time - of.record.asked_at)
        why = awaited_proof(of, fleet) or waits_for(of.record, run, fleet.served_version)
        found.append((of.record.number, of.tally.evaluation(of.record, seconds, waits_for=why)))
    return [evaluation for _, evaluation in sorted(found, key=lambda pair: pair[0])]


def message(evaluations: Evaluations, run: RunState, row: EvalRow) -> Ticket:
    """The ticket as a worker sees it."""
    record = evaluations.of(row.evaluation).record
    return Ticket(
        id=row.id,
        index=row.index,
        group_size=record.group_size,
        seed=evaluations.config.run.seed,
        version=row.version,
        expires_in_s=evaluations.config.queue.ticket_timeout_s,
        kind="eval",
        step=run.step,
        temperature=record.temperature,
    )


def undelivered(evaluations: Evaluations, worker_id: str, have: Sequence[str]) -> list[EvalRow]:
    """The worker's tickets that it does not have: the answer was lost, or it was restarted under its name (F10)."""
    held = set(have)
    return [row for row in evaluations.held_by(worker_id) if row.id not in held]


def submit(evaluations: Evaluations, fleet: Fleet, row: EvalRow, result: RowResult, wall_time: float) -> EvalChange:
    """Take in what a valid group came to."""
    done = msgspec.structs.replace(row, state=EvalRowState.DONE, result=result, reason=None)
    return with_ends(evaluations, fleet, [done], wall_time)


def check_accepted(evaluations: Evaluations, ticket_id: str) -> None:
    """Refuses a group whose ticket is not out (TICKET_ENDED), unless it was accepted before (F24)."""
    if not evaluations.was_accepted(ticket_id):
        raise Refusal(
            reasons.TICKET_ENDED, f"ticket {ticket_id} of an evaluation is not out any more: it or the evaluation ended"
        )


def fail(
    evaluations: Evaluations, fleet: Fleet, row: EvalRow, reason: str, retryable: bool, wall_time: float
) -> EvalChange:
    """A ticket yielded no group."""
    return with_ends(evaluations, fleet, [_failed(evaluations, row, reason, retryable)], wall_time)


def give_back(evaluations: Evaluations, fleet: Fleet, worker_id: str, wall_time: float) -> EvalChange:
    """Issue the rows of a worker that was refused again. They are not to blame, so no attempt is counted."""
    held = evaluations.held_by(worker_id)
    failed = [_failed(evaluations, row, reasons.FINGERPRINT, retryable=True) for row in held]
    return with_ends(evaluations, fleet, failed, wall_time)


def expire(evaluations: Evaluations, fleet: Fleet, now: float, wall_time: float) -> EvalChange:
    """End evaluations whose time is over, and tickets whose holders were not heard from in time (F10)."""
    over = evaluations.expired(now)
    gone = {of.record.number for of in over}
    late = [
        _failed(evaluations, row, _why_expired(evaluations, row, now), retryable=True)
        for row in evaluations.expired_tickets(now)
        if row.evaluation not in gone
    ]
    change = with_ends(evaluations, fleet, late, wall_time)
    ended = [ended_record(without_unproven(of, fleet), "deadline", wall_time) for of in over]
    return without_oldest(evaluations, msgspec.structs.replace(change, records=(*change.records, *ended)))


def begin(evaluations: Evaluations, message: BeginSession) -> EvalChange:
    """Forget what belongs to steps that the new session makes anew, and everything where it is a fresh start."""
    gone = [record.number for record in evaluations.records if record.step > message.step or not message.resume]
    return EvalChange(removed=tuple(gone))


def _rows_of_data(run: RunState) -> int | None:
    """Rows of the eval_dataset, as the session's workers say."""
    return run.data.eval_rows if run.data is not None and run.data_session == run.session else None


def _sized(record: EvalRecord, run: RunState) -> EvalRecord:
    """The record with its number of rows, which a worker has told."""
    there = _rows_of_data(run)
    if record.rows is not None or there is None:
        return record
    return msgspec.structs.replace(record, rows=there if record.wanted is None else min(record.wanted, there))


def _new_rows(record: EvalRecord) -> Iterator[EvalRow]:
    """Rows that were never issued, as if an attempt before their first had been."""
    for number in range(record.next_row, record.rows or 0):
        yield EvalRow(record.number, number, -1, 0, "", 0)


def _failed(evaluations: Evaluations, row: EvalRow, reason: str, retryable: bool) -> EvalRow:
    failures = row.failures + (reason not in _NO_ATTEMPT)
    again = retryable and failures < evaluations.config.queue.ticket_attempts
    return msgspec.structs.replace(
        row,
        state=EvalRowState.AGAIN if again else EvalRowState.FAILED,
        failures=failures,
        reason=reason if reasons.is_ours(reason) else reasons.OTHER,
    )


def _why_expired(evaluations: Evaluations, row: EvalRow, now: float) -> str:
    return reasons.OUTLIVED if evaluations.has_outlived(row.id, now) else reasons.EXPIRED
