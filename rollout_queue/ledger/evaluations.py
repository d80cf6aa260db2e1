"""Evaluations: their memory, their metrics, and the decisions on them. Pure: memory in, decision out.

They stand outside admission, the ledger's sums and leases. A row is issued until a group of it is accepted or its
attempts are used up; then it counts as failed. An evaluation ends when all of its rows have ended, at its deadline, or
with the run, whichever is first. A row sampled between a swap and its proof has not ended before the proof holds (I5):
if the proof fails the row is issued again, and an evaluation that ends without it counts the row as failed.

Only `apply` changes the memory. Deadlines are kept here only: after a restart of the queue each ticket and evaluation
gets its full time again.
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

# Finish reasons of a policy that was cut off.
_CUT_OFF = ("length", "context")


def row_result(group: Group, facts: GroupFacts) -> RowResult:
    """Reduce a valid group of an evaluation to what is kept of it."""
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
    """Mean and sample standard deviation of values added one by one (Welford 1962)."""

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
    """Adds up ended rows, each once. `evaluation` costs the same however many there are."""

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
        """Rows that are done or failed."""
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
        """Return the evaluation for people. Once it has ended, rows that have not count as failed."""
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


# Accepted tickets that are remembered, so that a repeat is recognised.
_MAX_ACCEPTED = 4096


class OpenEvaluation:
    """An evaluation that has not ended: its record, its rows by number, those to issue again, and their tally."""

    def __init__(self, record: EvalRecord) -> None:
        self.record = record
        self.rows: dict[int, EvalRow] = {}
        self.again: dict[int, EvalRow] = {}
        self.tally = EvalTally()

    def put(self, row: EvalRow) -> None:
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
    """Open evaluations, and the newest of those that have ended.

    Args:
        config: Gives the time-outs.
        contents: What the store held at the start.
        now: Current time of the clock that deadlines are in, seconds.
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
        """In the order of their requests."""
        return list(self._open.values())

    @property
    def ended(self) -> list[EvalRecord]:
        """In the order of their requests."""
        return [self._ended[number] for number in sorted(self._ended)]

    @property
    def records(self) -> list[EvalRecord]:
        return [*(of.record for of in self._open.values()), *self._ended.values()]

    def of(self, number: int) -> OpenEvaluation:
        return self._open[number]

    def ticket(self, ticket_id: str) -> EvalRow | None:
        """Return the row of a ticket that is with a worker; None for any other."""
        return self._tickets.get(ticket_id)

    def was_accepted(self, ticket_id: str) -> bool:
        """Tell whether a ticket's group was accepted, as far as that is remembered."""
        return ticket_id in self._accepted

    def held_by(self, worker_id: str) -> list[EvalRow]:
        return [row for row in self._tickets.values() if row.worker_id == worker_id]

    def episodes_of(self, rows: Iterable[EvalRow]) -> int:
        return sum(self._open[row.evaluation].record.group_size for row in rows)

    def renew_ticket(self, ticket_id: str, now: float) -> None:
        self._ticket_deadlines.renew(ticket_id, now)

    def has_outlived(self, ticket_id: str, now: float) -> bool:
        """Tell whether a ticket has reached the maximum age, however often it was renewed."""
        return self._ticket_deadlines.has_outlived(ticket_id, now)

    def expired_tickets(self, now: float) -> list[EvalRow]:
        return [self._tickets[ticket_id] for ticket_id in self._ticket_deadlines.expired(now)]

    def expired(self, now: float) -> list[OpenEvaluation]:
        """Return the open evaluations whose own time is over."""
        return [self._open[number] for number, due in self._deadlines.items() if due <= now]

    def next_deadline(self) -> float:
        """Return the first deadline; infinity if nothing is open."""
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
        if found is None:  # the evaluation has ended
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
    """Return the rows that are done and whose weights wait for their proof."""
    return [row for row in rows if _unproven(row, fleet) is not None]


def awaited_proof(of: OpenEvaluation, fleet: ServerRegistry) -> str | None:
    """Describe the proof that an evaluation waits for whose rows have all ended; None while there is more to sample."""
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
    """Return a server whose proof a done row waits for; None if there is none."""
    return None if row.result is None else fleet.unproven(GroupFacts(servers=row.result.servers))


# A learner that reconnects needs these, and the status shows them; evaluations.jsonl holds the rest.
MAX_ENDED = 256


def finish(evaluations: Evaluations, fleet: ServerRegistry, wall_time: float) -> EvalChange:
    """End all open evaluations with the run."""
    ended = [ended_record(without_unproven(of, fleet), "run_over", wall_time) for of in evaluations.open]
    return without_oldest(evaluations, EvalChange(records=tuple(ended)))


def judge(evaluations: Evaluations, fleet: ServerRegistry, wall_time: float) -> EvalChange:
    """React to a change of the `fleet` (I5).

    Rows sampled by weights that failed their proof, or left service before it, are issued again. Evaluations whose last
    missing proof this was end.
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
    """Change rows, and end the evaluations of which they are the last, unless some wait for a proof."""
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
    seconds = max(0.0, wall_time - of.record.asked_at)
    return msgspec.structs.replace(of.record, result=of.tally.and_also(last).evaluation(of.record, seconds, how))


def without_oldest(evaluations: Evaluations, change: EvalChange) -> EvalChange:
    """Forget the oldest ended evaluations beyond MAX_ENDED."""
    over = len(evaluations.ended) + len(change.records) - MAX_ENDED
    oldest = [record.number for record in evaluations.ended[: max(0, over)]]
    return msgspec.structs.replace(change, removed=(*change.removed, *oldest))


# More open evaluations mean that they take longer than the steps between them.
MAX_OPEN = 16

# Tickets in one answer to a worker.
_MAX_TICKETS = 1024

_NO_ATTEMPT = frozenset({reasons.failed(reasons.WORKER_STOPPED), reasons.FINGERPRINT})


class Asking(msgspec.Struct, frozen=True):
    """A worker that asks for tickets: it has room for `episodes`, and may hold `max_episodes` of evaluations in all.

    One group it may always hold.
    """

    worker_id: str
    episodes: int
    max_episodes: int


def asking(config: RunConfig, run: RunState, worker_id: str, wanted: int, capacity: int) -> Asking:
    """Describe the request of a worker of `capacity` episodes for `wanted` tickets, counted as training tickets."""
    max_episodes = capacity if run.all_steps_made else int(config.eval.share * capacity)
    return Asking(worker_id, wanted * config.rollout.group_size, max_episodes)


def ask(evaluations: Evaluations, run: RunState, request: EvaluationRequest, wall_time: float) -> Decision:
    """Open an evaluation unless its step has one. Refuses more than MAX_OPEN (EVALUATIONS_OPEN)."""
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
        served_version: Lowest version that serves; None if no server serves.
        serial: Training tickets issued so far.
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
    """Say what keeps tickets of an open evaluation from being issued; None if nothing does."""
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
    """Return the worker's tickets that it does not have: an answer was lost, or it was restarted under its name."""
    held = set(have)
    return [row for row in evaluations.held_by(worker_id) if row.id not in held]


def submit(
    evaluations: Evaluations, fleet: ServerRegistry, row: EvalRow, result: RowResult, wall_time: float
) -> EvalChange:
    """Accept the result of a valid group."""
    done = msgspec.structs.replace(row, state=EvalRowState.DONE, result=result, reason=None)
    return with_ends(evaluations, fleet, [done], wall_time)


def check_accepted(evaluations: Evaluations, ticket_id: str) -> None:
    """Refuse a group whose ticket is not with a worker (TICKET_ENDED), unless it was accepted before."""
    if not evaluations.was_accepted(ticket_id):
        raise Refusal(
            reasons.TICKET_ENDED, f"ticket {ticket_id} of an evaluation is not out any more: it or the evaluation ended"
        )


def fail(
    evaluations: Evaluations, fleet: ServerRegistry, row: EvalRow, reason: str, retryable: bool, wall_time: float
) -> EvalChange:
    """End a ticket that yielded no group."""
    return with_ends(evaluations, fleet, [_failed(evaluations, row, reason, retryable)], wall_time)


def give_back(evaluations: Evaluations, fleet: ServerRegistry, worker_id: str, wall_time: float) -> EvalChange:
    """Issue the rows of a refused worker again, without counting an attempt."""
    held = evaluations.held_by(worker_id)
    failed = [_failed(evaluations, row, reasons.FINGERPRINT, retryable=True) for row in held]
    return with_ends(evaluations, fleet, failed, wall_time)


def expire(evaluations: Evaluations, fleet: ServerRegistry, now: float, wall_time: float) -> EvalChange:
    """End evaluations whose time is over, and tickets whose holders were not heard from in time."""
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
    """Forget evaluations of steps that the new session makes anew; all of them at a fresh start."""
    gone = [record.number for record in evaluations.records if record.step > message.step or not message.resume]
    return EvalChange(removed=tuple(gone))


def _rows_of_data(run: RunState) -> int | None:
    """Return the rows of the eval_dataset by the session's workers; None if unknown."""
    return run.data.eval_rows if run.data is not None and run.data_session == run.session else None


def _sized(record: EvalRecord, run: RunState) -> EvalRecord:
    """Return the record with its number of rows, once a worker has reported the data set's."""
    there = _rows_of_data(run)
    if record.rows is not None or there is None:
        return record
    return msgspec.structs.replace(record, rows=there if record.wanted is None else min(record.wanted, there))


def _new_rows(record: EvalRecord) -> Iterator[EvalRow]:
    """Yield rows that were never issued, as if there had been an attempt before the first."""
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
