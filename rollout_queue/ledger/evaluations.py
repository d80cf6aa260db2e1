"""Decisions on evaluations: open one, issue its tickets, end it. Pure: ledger in, decision out.

The tickets of an evaluation live and end as those of the training do (`tickets`), but an accepted group is reduced to
its result at once. They are in no lease, and neither admission nor any sum of the training counts them.

A row is issued until a group of it is accepted. It counts as failed once its attempts are used up. An evaluation ends
when all of its rows have ended, at its deadline, or with the run, whichever is first.

A row sampled between a swap and its proof ends only when the proof holds (I5). If the proof fails, the row is issued
again. An evaluation that ends before the proof counts the row as failed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

import msgspec

from slipstream.protocol import reasons
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import BeginSession, Group
from slipstream.protocol.status import Ended, Evaluation, EvaluationRequest
from slipstream.rollout_queue.ledger.ledger import Ledger
from slipstream.rollout_queue.ledger.open_evaluations import EvalTally, OpenEvaluation
from slipstream.rollout_queue.ledger.records import (
    Decision,
    EvalRecord,
    GroupFacts,
    Refusal,
    RowResult,
    RunState,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.ledger.server_registry import ServerRegistry

# A learner that reconnects needs these, and the status shows them; evaluations.jsonl holds the rest.
MAX_ENDED = 256

# If more are open, evaluations take longer than the steps between them.
MAX_OPEN = 16

# Bounds the tickets in one answer to a worker.
_MAX_TICKETS = 1024


def begin(ledger: Ledger, message: BeginSession) -> tuple[int, ...]:
    """Return the evaluations to forget: those of steps that the new session repeats; all of them at a fresh start."""
    records = ledger.evaluations.records
    return tuple(record.number for record in records if record.step > message.step or not message.resume)


def ask(ledger: Ledger, request: EvaluationRequest, wall_time: float) -> Decision:
    """Open an evaluation unless its step already has one.

    Raises:
        Refusal: EVALUATIONS_OPEN, if MAX_OPEN evaluations are open.
    """
    run, evaluations = ledger.run, ledger.evaluations
    if any(known.step == request.step for known in evaluations.records):
        return Decision()
    if len(evaluations.open) >= MAX_OPEN:
        raise Refusal(
            reasons.EVALUATIONS_OPEN,
            f"{len(evaluations.open)} evaluations are open, the oldest of step {evaluations.open[0].record.step}: they "
            f"take longer than the steps between them; raise eval.every or eval.share, or lower eval.rows",
        )
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
    return Decision(run=msgspec.structs.replace(run, evaluations=run.evaluations + 1), evaluations=(record,))


class Asking(msgspec.Struct, frozen=True):
    """Describes a worker that asks for tickets. It may always hold one group.

    Attributes:
        worker_id: Its name.
        episodes: Number of further episodes that it has room for.
        max_episodes: Maximum number of evaluation episodes that it may hold in total.
    """

    worker_id: str
    episodes: int
    max_episodes: int


def asking(config: RunConfig, run: RunState, worker_id: str, wanted: int, capacity: int) -> Asking:
    """Describe a worker's request for tickets.

    Args:
        config: Gives the group size and the share of evaluations.
        run: Before the first step and after the last, evaluations that the learner waits for may take the whole
            capacity.
        worker_id: Name of the worker.
        wanted: Number of tickets, counted as training tickets.
        capacity: Episodes that the worker can run at once.
    """
    awaited = run.all_steps_made or (config.eval.at_start and run.step == 0)
    max_episodes = capacity if awaited else int(config.eval.share * capacity)
    return Asking(worker_id, wanted * config.rollout.group_size, max_episodes)


def issue(ledger: Ledger, served_version: int | None, asking: Asking) -> Decision:
    """Issue tickets to a worker: the oldest evaluation first, and in each the rows to issue again first.

    Args:
        ledger: Tickets and evaluations.
        served_version: Lowest version that serves; None if no server serves.
        asking: The worker and its room.
    """
    run, evaluations = ledger.run, ledger.evaluations
    held = episodes_of(ledger, ledger.held_by(asking.worker_id))
    left = min(asking.episodes, asking.max_episodes - held)
    records: list[EvalRecord] = []
    issued: list[TicketRecord] = []
    for of in evaluations.open:
        if waits_for(of.record, run, served_version) is not None:
            continue
        record = _sized(of.record, run)
        again = ((row, of.to_reissue[row]) for row in sorted(of.to_reissue))
        new = ((row, None) for row in range(record.next_row, record.rows or 0))
        for row, before in chain(again, new):
            alone = held == 0 and not issued
            if (record.group_size > left and not alone) or len(issued) == _MAX_TICKETS:
                break
            left -= record.group_size
            issued.append(
                TicketRecord(
                    index=row,
                    attempt=0 if before is None else before.attempt + 1,
                    serial=ledger.issued,
                    worker_id=asking.worker_id,
                    version=run.version,
                    failures=0 if before is None else before.failures,
                    evaluation=record.number,
                )
            )
            if row == record.next_row:
                record = msgspec.structs.replace(record, next_row=row + 1)
        if record != of.record:
            records.append(record)
    return Decision(tuple(issued), evaluations=tuple(records))


def episodes_of(ledger: Ledger, records: Iterable[TicketRecord]) -> int:
    """Count the episodes of the tickets that are of evaluations."""
    found = (ledger.evaluations.record_of(record) for record in records)
    return sum(record.group_size for record in found if record is not None)


def accept(record: TicketRecord, group: Group, facts: GroupFacts) -> Decision:
    """Accept the valid group of an evaluation's ticket, and keep its result in its place."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in group.rollouts:
        for name, value in rollout.reward_components.items():
            if value is not None:
                by_name[name].append(value)
    best = [max(group.rollouts[number].reward for number in numbers) for numbers in group.by_role().values()]
    result = RowResult(
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        components={name: math.fsum(values) / len(values) for name, values in by_name.items()},
        lengths=tuple(rollout.sampled_tokens for rollout in group.rollouts),
        finished=dict(Counter(str(rollout.finish_reason) for rollout in group.rollouts)),
        best=math.fsum(best) / len(best),
    )
    return Decision((record.to(TicketState.EVALUATED, group=facts, result=result, reason=None),))


def expire(ledger: Ledger, fleet: ServerRegistry, now: float, wall_time: float) -> tuple[EvalRecord, ...]:
    """End the evaluations that have passed their deadline."""
    return tuple(_ended_early(of, fleet, "deadline", wall_time) for of in ledger.evaluations.expired(now))


def finish(ledger: Ledger, fleet: ServerRegistry, wall_time: float) -> tuple[EvalRecord, ...]:
    """End all open evaluations with the run."""
    return tuple(_ended_early(of, fleet, "run_over", wall_time) for of in ledger.evaluations.open)


def with_ends(ledger: Ledger, fleet: ServerRegistry, decision: Decision, wall_time: float) -> Decision:
    """Add to any decision the ends of evaluations that follow from it.

    An evaluation ends once all of its rows have ended and no row waits for a proof. The oldest ended evaluations beyond
    MAX_ENDED are forgotten.

    Args:
        ledger: Tickets and evaluations before the decision.
        fleet: The servers before it.
        decision: The decision.
        wall_time: Current wall-clock time, seconds.
    """
    changed = {record.number: record for record in decision.evaluations}
    tickets: defaultdict[int, list[TicketRecord]] = defaultdict(list)
    for ticket in decision.tickets:
        if ticket.evaluation is not None:
            tickets[ticket.evaluation].append(ticket)
    for of in ledger.evaluations.open:
        record, ends = changed.get(number := of.record.number, of.record), tickets.get(number, ())
        touched = decision.servers or number in changed or ends
        if not touched or record.result is not None or number in decision.forgotten:
            continue
        if record.rows is None or of.tally.ended + len(ends) < record.rows:
            continue
        if any(ticket.state is TicketState.REISSUED for ticket in ends):
            continue
        tally = of.tally.and_also(ends) if ends else of.tally
        if tally.ended == record.rows and not _unproven_servers(tally, fleet.after(decision.servers)):
            seconds = max(0.0, wall_time - record.asked_at)
            changed[number] = msgspec.structs.replace(record, result=tally.evaluation(record, seconds, "complete"))
    if not changed:
        return decision
    ended = ledger.evaluations.ended
    over = len(ended) + sum(record.result is not None for record in changed.values()) - MAX_ENDED
    return msgspec.structs.replace(
        decision,
        evaluations=tuple(changed.values()),
        forgotten=(*decision.forgotten, *(record.number for record in ended[: max(0, over)])),
    )


def with_tickets(ledger: Ledger, served_version: int | None) -> frozenset[int]:
    """Return the numbers of the open evaluations of which tickets can be issued now."""
    return frozenset(
        of.record.number
        for of in ledger.evaluations.open
        if waits_for(of.record, ledger.run, served_version) is None
        and (of.to_reissue or of.record.rows is None or of.record.next_row < of.record.rows)
    )


def waits_for(record: EvalRecord, run: RunState, served_version: int | None) -> str | None:
    """Return why no tickets of an open evaluation can be issued; None if they can."""
    if served_version is None:
        return "a server that serves"
    if served_version < record.version:
        return f"version {record.version} on every server that serves, the oldest has {served_version}"
    if record.rows is None and _rows_of_data(run) is None:
        return "a worker that has read the eval_dataset"
    return None


def views(ledger: Ledger, fleet: ServerRegistry, wall_time: float) -> list[Evaluation]:
    """Return all evaluations for people, in the order of their requests."""
    evaluations = ledger.evaluations
    found = [(record.number, record.result) for record in evaluations.ended if record.result is not None]
    for of in evaluations.open:
        seconds = max(0.0, wall_time - of.record.asked_at)
        why = _awaited_proof(of, fleet) or waits_for(of.record, ledger.run, fleet.served_version)
        found.append((of.record.number, of.tally.evaluation(of.record, seconds, waits_for=why)))
    return [evaluation for _, evaluation in sorted(found, key=lambda pair: pair[0])]


def _ended_early(of: OpenEvaluation, fleet: ServerRegistry, how: Ended, wall_time: float) -> EvalRecord:
    """Return the record of an evaluation that ends as it is. Rows that wait for a proof count as failed."""
    tally = OpenEvaluation(of.record, (_failed_if_unproven(ticket, fleet) for ticket in of.tickets.values())).tally
    seconds = max(0.0, wall_time - of.record.asked_at)
    return msgspec.structs.replace(of.record, result=tally.evaluation(of.record, seconds, how))


def _failed_if_unproven(ticket: TicketRecord, fleet: ServerRegistry) -> TicketRecord:
    if ticket.state is not TicketState.EVALUATED or fleet.unproven(ticket.group) is None:
        return ticket
    return msgspec.structs.replace(ticket, state=TicketState.DROPPED, reason=reasons.UNVERIFIED_SERVER)


def _unproven_servers(tally: EvalTally, fleet: ServerRegistry) -> list[str]:
    """Return the servers that sampled rows with weights that are not proven on them yet, by name."""
    return sorted(name for name, version in tally.newest.items() if not fleet.is_proven(name, version))


def _awaited_proof(of: OpenEvaluation, fleet: ServerRegistry) -> str | None:
    """Describe the proof that an evaluation waits for, once all of its rows have ended.

    Returns:
        A description; None while there is more to sample, or if no proof is missing.
    """
    if of.record.rows is None or of.tally.ended < of.record.rows:
        return None
    names = _unproven_servers(of.tally, fleet)
    return f"the proof of the weights that {', '.join(names)} sampled its rows with" if names else None


def _rows_of_data(run: RunState) -> int | None:
    """Return the number of rows of the eval_dataset, as the session's workers reported it; None if unknown."""
    return run.data.eval_rows if run.data is not None and run.data_session == run.session else None


def _sized(record: EvalRecord, run: RunState) -> EvalRecord:
    """Return the record with its number of rows, once a worker has reported the size of the data set."""
    there = _rows_of_data(run)
    if record.rows is not None or there is None:
        return record
    return msgspec.structs.replace(record, rows=there if record.wanted is None else min(record.wanted, there))
