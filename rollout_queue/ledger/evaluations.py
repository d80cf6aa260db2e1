"""Keeps the evaluations, computes their metrics, and decides on them. Decisions are pure: memory in, decision out.

Only `Evaluations.apply` changes what is kept. Evaluations do not count in admission, the ledger's sums or leases.

A row is issued until one of its groups is accepted. It counts as failed once its attempts are used up. An evaluation
ends when all of its rows have ended, at its deadline, or with the run, whichever is first.

A row sampled between a swap and its proof ends only when the proof holds (I5). If the proof fails, the row is issued
again. An evaluation that ends before the proof counts the row as failed.

Deadlines are kept in memory only. After a restart of the queue, each ticket and evaluation gets its full time again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import chain

import msgspec

from protocol import reasons
from protocol.config import RunConfig
from protocol.messages import BeginSession, Group, Ticket
from protocol.status import Ended, Evaluation, EvaluationRequest
from rollout_queue.ledger.ledger import Deadlines
from rollout_queue.ledger.records import (
    Decision,
    EvalChange,
    EvalRecord,
    EvalRow,
    EvalRowState,
    GroupFacts,
    Refusal,
    RowResult,
    RunState,
    StoreContents,
)
from rollout_queue.ledger.servers import ServerRegistry

# Finish reasons that mean that the policy was cut off.
_CUT_OFF = ("length", "context")


def row_result(group: Group, facts: GroupFacts) -> RowResult:
    """Reduce a valid group of an evaluation to the result that is kept.

    Args:
        group: The group.
        facts: Gives the servers and versions that sampled it.
    """
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in group.rollouts:
        for name, value in rollout.reward_components.items():
            if value is not None:
                by_name[name].append(value)
    return RowResult(
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        components={name: math.fsum(values) / len(values) for name, values in by_name.items()},
        lengths=tuple(rollout.sampled_tokens for rollout in group.rollouts),
        finished=dict(Counter(str(rollout.finish_reason) for rollout in group.rollouts)),
        servers=facts.servers,
    )


class _Mean(msgspec.Struct):
    """Computes mean and sample standard deviation of values added one by one (Welford 1962)."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        before = self.total / self.count if self.count else value
        self.count += 1
        self.total += value
        self.squares += (value - before) * (value - self.total / self.count)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def std(self) -> float | None:
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None


class EvalTally:
    """Adds up ended rows, each once. The cost of `evaluation` does not grow with their number."""

    def __init__(self, rows: Iterable[EvalRow] = ()) -> None:
        self.failures: Counter[str] = Counter()
        self._rewards, self._best = _Mean(), _Mean()
        self._components: defaultdict[str, _Mean] = defaultdict(_Mean)
        self._passes = True
        self._rollouts = self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._versions: tuple[int, int] | None = None
        for row in rows:
            self.add(row)

    @property
    def ended(self) -> int:
        """Return the number of rows that are done or failed."""
        return self._rewards.count + self.failures.total()

    def add(self, row: EvalRow) -> None:
        """Count a row if it has ended."""
        if row.state is EvalRowState.FAILED:
            self.failures[row.reason or reasons.OTHER] += 1
        if row.state is not EvalRowState.DONE or (result := row.result) is None:
            return
        self._rewards.add(math.fsum(result.rewards) / len(result.rewards))
        self._best.add(max(result.rewards))
        self._passes = self._passes and all(reward in (0.0, 1.0) for reward in result.rewards)
        for name, value in result.components.items():
            self._components[name].add(value)
        self._rollouts += len(result.rewards)
        self._tokens += sum(result.lengths)
        self._finished.update(result.finished)
        versions = [version for by in result.servers for version in (by.oldest, by.newest)]
        seen = [*versions, *(self._versions or ())]
        self._versions = (min(seen), max(seen)) if seen else None

    def and_also(self, rows: Iterable[EvalRow]) -> EvalTally:
        """Return a copy of this tally with further rows."""
        more = deepcopy(self)
        for row in rows:
            more.add(row)
        return more

    def evaluation(
        self, record: EvalRecord, seconds: float, ended: Ended | None = None, waits_for: str | None = None
    ) -> Evaluation:
        """Return the evaluation for people.

        Args:
            record: The evaluation's record.
            seconds: Time since it was requested.
            ended: How it ended; None while it is open. After its end, rows without an end count as failed.
            waits_for: Why no tickets are issued or it does not end; None if nothing keeps it.
        """
        failures, rows = dict(self.failures), record.rows
        if ended is not None and rows is not None and (left := rows - self.ended) > 0:
            reason = reasons.RUN_FINISHED if ended == "run_over" else reasons.DEADLINE
            failures[reason] = failures.get(reason, 0) + left
        cut_off = sum(self._finished[reason] for reason in _CUT_OFF)
        return Evaluation(
            step=record.step,
            version=record.version,
            group_size=record.group_size,
            temperature=record.temperature,
            rows=rows,
            done=self._rewards.count,
            failed=sum(failures.values()),
            failures=failures,
            ended=ended,
            waits_for=waits_for,
            seconds=seconds,
            rollouts=self._rollouts,
            reward=self._rewards.value,
            reward_std=self._rewards.std,
            rewards={name: of.total / of.count for name, of in self._components.items()},
            best=self._best.value if record.group_size > 1 else None,
            passes=self._passes and self._rewards.count > 0,
            mean_length=self._tokens / self._rollouts if self._rollouts else None,
            clipped=cut_off / self._rollouts if self._rollouts else None,
            finished=dict(self._finished),
            versions=self._versions,
        )


# So many accepted tickets are remembered, to recognise a group that is submitted again.
_MAX_ACCEPTED = 4096


class OpenEvaluation:
    """Holds an evaluation that has not ended.

    Attributes:
        record: Its record.
        rows: Its rows by number.
        again: Rows to issue again, by number.
        tally: Sums of its ended rows.
    """

    def __init__(self, record: EvalRecord) -> None:
        self.record = record
        self.rows: dict[int, EvalRow] = {}
        self.again: dict[int, EvalRow] = {}
        self.tally = EvalTally()

    def put(self, row: EvalRow) -> None:
        """Add a row or replace its earlier state."""
        before = self.rows.get(row.index)
        self.rows[row.index] = row
        self.again.pop(row.index, None)
        if row.state is EvalRowState.AGAIN:
            self.again[row.index] = row
        if before is not None and before.state is EvalRowState.DONE:
            self.tally = EvalTally(self.rows.values())
        else:
            self.tally.add(row)


class Evaluations:
    """Keeps the open evaluations, and the newest ended ones.

    Args:
        config: Gives the time-outs.
        contents: Contents of the store at the start.
        now: Current time of the clock for deadlines, seconds.
    """

    def __init__(self, config: RunConfig, contents: StoreContents, now: float) -> None:
        self.config = config
        self._open: dict[int, OpenEvaluation] = {}
        self._ended: dict[int, EvalRecord] = {}
        self._tickets: dict[str, EvalRow] = {}
        self._ticket_deadlines = Deadlines(config.queue.ticket_timeout_s, config.ticket_max_age_s)
        self._deadlines: dict[int, float] = {}
        self._accepted: dict[str, None] = {}
        for record in sorted(contents.evaluations, key=lambda record: record.number):
            self._enter(record, now)
        for row in sorted(contents.eval_rows, key=lambda row: (row.evaluation, row.index)):
            self._put(row, now)

    @property
    def open(self) -> list[OpenEvaluation]:
        """Return the open evaluations in the order of their requests."""
        return list(self._open.values())

    @property
    def ended(self) -> list[EvalRecord]:
        """Return the records of the ended evaluations in the order of their requests."""
        return [self._ended[number] for number in sorted(self._ended)]

    @property
    def records(self) -> list[EvalRecord]:
        """Return the records of all evaluations, the open ones first."""
        return [*(of.record for of in self._open.values()), *self._ended.values()]

    def of(self, number: int) -> OpenEvaluation:
        """Return the open evaluation with a number."""
        return self._open[number]

    def ticket(self, ticket_id: str) -> EvalRow | None:
        """Return the row of a ticket that a worker holds; None for any other ticket."""
        return self._tickets.get(ticket_id)

    def was_accepted(self, ticket_id: str) -> bool:
        """Return whether a ticket's group was accepted. Only the newest accepted tickets are remembered."""
        return ticket_id in self._accepted

    def held_by(self, worker_id: str) -> list[EvalRow]:
        """Return the rows with tickets that a worker holds."""
        return [row for row in self._tickets.values() if row.worker_id == worker_id]

    def episodes_of(self, rows: Iterable[EvalRow]) -> int:
        """Count the episodes of rows of open evaluations."""
        return sum(self._open[row.evaluation].record.group_size for row in rows)

    def renew_ticket(self, ticket_id: str, now: float) -> None:
        """Give a ticket its full time again from `now`, up to its maximum age."""
        self._ticket_deadlines.renew(ticket_id, now)

    def has_outlived(self, ticket_id: str, now: float) -> bool:
        """Return whether a ticket has reached the maximum age. Renewals do not extend that age."""
        return self._ticket_deadlines.has_outlived(ticket_id, now)

    def expired_tickets(self, now: float) -> list[EvalRow]:
        """Return the rows of tickets that have passed their deadline."""
        return [self._tickets[ticket_id] for ticket_id in self._ticket_deadlines.expired(now)]

    def expired(self, now: float) -> list[OpenEvaluation]:
        """Return the open evaluations that have passed their deadline."""
        return [self._open[number] for number, due in self._deadlines.items() if due <= now]

    def next_deadline(self) -> float:
        """Return the first deadline of a ticket or evaluation; infinity if nothing is open."""
        return min([self._ticket_deadlines.soonest(), *self._deadlines.values()])

    def apply(self, change: EvalChange, now: float) -> None:
        """Apply a change that the store has committed."""
        for record in change.records:
            self._enter(record, now)
        for row in change.rows:
            self._put(row, now)
        for number in change.removed:
            self._end(number)
            self._ended.pop(number, None)

    def _enter(self, record: EvalRecord, now: float) -> None:
        number = record.number
        if record.result is not None:
            self._end(number)
            self._ended[number] = record
        elif number in self._open:
            self._open[number].record = record
        else:
            self._open[number] = OpenEvaluation(record)
            self._deadlines[number] = now + record.timeout_s

    def _end(self, number: int) -> None:
        ended = self._open.pop(number, None)
        if ended is not None:
            del self._deadlines[number]
            for row in ended.rows.values():
                self._leave(row)

    def _put(self, row: EvalRow, now: float) -> None:
        found = self._open.get(row.evaluation)
        if row.state is EvalRowState.DONE:
            self._accepted[row.id] = None
            while len(self._accepted) > _MAX_ACCEPTED:
                del self._accepted[next(iter(self._accepted))]
        if found is None:  # The evaluation has ended.
            return
        before = found.rows.get(row.index)
        if before is not None:
            self._leave(before)
        found.put(row)
        if row.state is EvalRowState.ISSUED:
            self._tickets[row.id] = row
            self._ticket_deadlines.start(row.id, now)

    def _leave(self, row: EvalRow) -> None:
        self._tickets.pop(row.id, None)
        self._ticket_deadlines.end(row.id)


def unproven_rows(rows: Iterable[EvalRow], fleet: ServerRegistry) -> list[EvalRow]:
    """Return the done rows that wait for the proof of the weights that sampled them."""
    return [row for row in rows if _unproven(row, fleet) is not None]


def awaited_proof(of: OpenEvaluation, fleet: ServerRegistry) -> str | None:
    """Describe the proof that an evaluation waits for, once all of its rows have ended.

    Returns:
        A description; None while there is more to sample, or if no proof is missing.
    """
    if of.record.rows is None or of.tally.ended < of.record.rows:
        return None
    names = sorted({name for row in of.rows.values() if (name := _unproven(row, fleet)) is not None})
    return f"the proof of the weights that {', '.join(names)} sampled its rows with" if names else None


def without_unproven(of: OpenEvaluation, fleet: ServerRegistry) -> OpenEvaluation:
    """Return the evaluation with its unproven rows counted as failed."""
    unproven = unproven_rows(of.rows.values(), fleet)
    if not unproven:
        return of
    counted = OpenEvaluation(of.record)
    for row in of.rows.values():
        counted.put(row)
    for row in unproven:
        reason = reasons.UNVERIFIED_SERVER
        counted.put(msgspec.structs.replace(row, state=EvalRowState.FAILED, result=None, reason=reason))
    return counted


def _unproven(row: EvalRow, fleet: ServerRegistry) -> str | None:
    """Return the name of a server if a done row waits for its proof; None if there is none."""
    return None if row.result is None else fleet.unproven(GroupFacts(servers=row.result.servers))


# A learner that reconnects needs these, and the status shows them; evaluations.jsonl holds the rest.
MAX_ENDED = 256


def finish(evaluations: Evaluations, fleet: ServerRegistry, wall_time: float) -> EvalChange:
    """End all open evaluations with the run."""
    ended = [ended_record(without_unproven(of, fleet), "run_over", wall_time) for of in evaluations.open]
    return without_oldest(evaluations, EvalChange(records=tuple(ended)))


def judge(evaluations: Evaluations, fleet: ServerRegistry, wall_time: float) -> EvalChange:
    """React to a change of the `fleet` (I5).

    Rows are issued again if their weights failed the proof, or left service before it. Evaluations end if they waited
    only for proofs that now hold.
    """
    tainted = [
        msgspec.structs.replace(row, state=EvalRowState.AGAIN, result=None, reason=reasons.UNVERIFIED_SERVER)
        for of in evaluations.open
        for row in of.rows.values()
        if row.result is not None and fleet.tainted(GroupFacts(servers=row.result.servers), row.serial)
    ]
    spoilt = {row.evaluation for row in tainted}
    ended = [
        ended_record(of, "complete", wall_time)
        for of in evaluations.open
        if of.record.number not in spoilt
        and of.record.rows is not None
        and of.tally.ended == of.record.rows
        and not unproven_rows(of.rows.values(), fleet)
    ]
    return without_oldest(evaluations, EvalChange(records=tuple(ended), rows=tuple(tainted)))


def with_ends(evaluations: Evaluations, fleet: ServerRegistry, rows: Iterable[EvalRow], wall_time: float) -> EvalChange:
    """Change rows, and end each evaluation that has no other rows left, unless a row waits for a proof."""
    by_evaluation: dict[int, list[EvalRow]] = {}
    for row in rows:
        by_evaluation.setdefault(row.evaluation, []).append(row)
    ended: list[EvalRecord] = []
    for number, changed in by_evaluation.items():
        of = evaluations.of(number)
        after = {**of.rows, **{row.index: row for row in changed}}
        if of.tally.and_also(changed).ended == of.record.rows and not unproven_rows(after.values(), fleet):
            ended.append(ended_record(of, "complete", wall_time, changed))
    rows_changed = tuple(row for changed in by_evaluation.values() for row in changed)
    return without_oldest(evaluations, EvalChange(records=tuple(ended), rows=rows_changed))


def ended_record(of: OpenEvaluation, how: Ended, wall_time: float, last: Iterable[EvalRow] = ()) -> EvalRecord:
    """Return the record of an evaluation that ends now, with its result.

    Args:
        of: The evaluation.
        how: How it ends.
        wall_time: Current wall-clock time, seconds.
        last: Rows that end with it and are not in its tally yet.
    """
    seconds = max(0.0, wall_time - of.record.asked_at)
    return msgspec.structs.replace(of.record, result=of.tally.and_also(last).evaluation(of.record, seconds, how))


def without_oldest(evaluations: Evaluations, change: EvalChange) -> EvalChange:
    """Forget the oldest ended evaluations beyond MAX_ENDED."""
    over = len(evaluations.ended) + len(change.records) - MAX_ENDED
    oldest = [record.number for record in evaluations.ended[: max(0, over)]]
    return msgspec.structs.replace(change, removed=(*change.removed, *oldest))


# If more are open, evaluations take longer than the steps between them.
MAX_OPEN = 16

# Bounds the tickets in one answer to a worker.
_MAX_TICKETS = 1024

_NO_ATTEMPT = frozenset({reasons.failed(reasons.WORKER_STOPPED), reasons.FINGERPRINT})


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
        run: After the last step, evaluations may take the whole capacity.
        worker_id: Name of the worker.
        wanted: Number of tickets, counted as training tickets.
        capacity: Episodes that the worker can run at once.
    """
    max_episodes = capacity if run.all_steps_made else int(config.eval.share * capacity)
    return Asking(worker_id, wanted * config.rollout.group_size, max_episodes)


def ask(evaluations: Evaluations, run: RunState, request: EvaluationRequest, wall_time: float) -> Decision:
    """Open an evaluation unless its step already has one.

    Raises:
        Refusal: EVALUATIONS_OPEN, if MAX_OPEN evaluations are open.
    """
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
    if len(evaluations.open) >= MAX_OPEN:
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
    """Issue tickets to a worker: the oldest evaluation first, and in each the rows to issue again first.

    Args:
        evaluations: All evaluations.
        run: State of the run.
        served_version: Lowest version that serves; None if no server serves.
        serial: Number of training tickets issued so far.
        asking: The worker and its room.
        wall_time: Current wall-clock time, seconds.
    """
    held = evaluations.episodes_of(evaluations.held_by(asking.worker_id))
    left = min(asking.episodes, asking.max_episodes - held)
    records: list[EvalRecord] = []
    issued: list[EvalRow] = []
    for of in evaluations.open:
        if waits_for(of.record, run, served_version) is not None:
            continue
        record = _sized(of.record, run)
        size = record.group_size
        for row in chain((of.again[number] for number in sorted(of.again)), _new_rows(record)):
            alone = held == 0 and not issued
            if (size > left and not alone) or len(issued) == _MAX_TICKETS:
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
    """Return why no tickets of an open evaluation can be issued; None if they can."""
    if served_version is None:
        return "a server that serves"
    if served_version < record.version:
        return f"version {record.version} on every server that serves, the oldest has {served_version}"
    if record.rows is None and _rows_of_data(run) is None:
        return "a worker that has read the eval_dataset"
    return None


def views(evaluations: Evaluations, run: RunState, fleet: ServerRegistry, wall_time: float) -> list[Evaluation]:
    """Return all evaluations for people, in the order of their requests."""
    found = [(record.number, record.result) for record in evaluations.ended if record.result is not None]
    for of in evaluations.open:
        seconds = max(0.0, wall_time - of.record.asked_at)
        why = awaited_proof(of, fleet) or waits_for(of.record, run, fleet.served_version)
        found.append((of.record.number, of.tally.evaluation(of.record, seconds, waits_for=why)))
    return [evaluation for _, evaluation in sorted(found, key=lambda pair: pair[0])]


def message(evaluations: Evaluations, run: RunState, row: EvalRow) -> Ticket:
    """Return the ticket as a message to the worker."""
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
    """Return the rows of tickets that were issued to a worker and that it does not have.

    Either an answer was lost, or the worker was restarted under the same name.

    Args:
        evaluations: All evaluations.
        worker_id: Name of the worker.
        have: Ids of the tickets that it has.
    """
    held = set(have)
    return [row for row in evaluations.held_by(worker_id) if row.id not in held]


def submit(
    evaluations: Evaluations, fleet: ServerRegistry, row: EvalRow, result: RowResult, wall_time: float
) -> EvalChange:
    """Accept the result of a valid group."""
    done = msgspec.structs.replace(row, state=EvalRowState.DONE, result=result, reason=None)
    return with_ends(evaluations, fleet, [done], wall_time)


def check_accepted(evaluations: Evaluations, ticket_id: str) -> None:
    """Check that a group was accepted before, if no worker holds its ticket.

    Raises:
        Refusal: TICKET_ENDED, if it was not.
    """
    if not evaluations.was_accepted(ticket_id):
        raise Refusal(
            reasons.TICKET_ENDED, f"ticket {ticket_id} of an evaluation is not out any more: it or the evaluation ended"
        )


def fail(
    evaluations: Evaluations, fleet: ServerRegistry, row: EvalRow, reason: str, retryable: bool, wall_time: float
) -> EvalChange:
    """End a ticket without a group. Its row is issued again if `retryable` and attempts are left."""
    return with_ends(evaluations, fleet, [_failed(evaluations, row, reason, retryable)], wall_time)


def give_back(evaluations: Evaluations, fleet: ServerRegistry, worker_id: str, wall_time: float) -> EvalChange:
    """Issue the rows of a refused worker again, without counting an attempt."""
    held = evaluations.held_by(worker_id)
    failed = [_failed(evaluations, row, reasons.FINGERPRINT, retryable=True) for row in held]
    return with_ends(evaluations, fleet, failed, wall_time)


def expire(evaluations: Evaluations, fleet: ServerRegistry, now: float, wall_time: float) -> EvalChange:
    """End evaluations that have passed their deadline, and tickets that their workers did not renew in time."""
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
    """Forget evaluations of steps that the new session repeats; all of them at a fresh start."""
    gone = [record.number for record in evaluations.records if record.step > message.step or not message.resume]
    return EvalChange(removed=tuple(gone))


def _rows_of_data(run: RunState) -> int | None:
    """Return the number of rows of the eval_dataset, as the session's workers reported it; None if unknown."""
    return run.data.eval_rows if run.data is not None and run.data_session == run.session else None


def _sized(record: EvalRecord, run: RunState) -> EvalRecord:
    """Return the record with its number of rows, once a worker has reported the size of the data set."""
    there = _rows_of_data(run)
    if record.rows is not None or there is None:
        return record
    return msgspec.structs.replace(record, rows=there if record.wanted is None else min(record.wanted, there))


def _new_rows(record: EvalRecord) -> Iterator[EvalRow]:
    """Yield the rows that were never issued. Their attempt is -1, so that the first one issued is 0."""
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
