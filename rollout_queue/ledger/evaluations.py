"""The queue's memory of evaluations: open ones with their rows, and the newest of those that have ended.

Evaluations stand outside admission, the ledger's sums and leases. `eval_tickets` reads this and decides; `apply` alone
changes it. Deadlines are kept here only: after a restart of the queue each ticket and evaluation gets its full time
again.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.config import RunConfig
from rollout_queue.ledger.deadlines import Deadlines
from rollout_queue.ledger.eval_tally import EvalTally
from rollout_queue.ledger.records import EvalChange, EvalRecord, EvalRow, EvalRowState, StoreContents

# Tickets that were accepted and of which nothing else is known any more: a repeat is still answered as one.
_REMEMBERED = 4096


class OpenEvaluation:
    """One that has not ended: its record, its rows by number, those of them to be issued again, and their tally."""

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
    """`config` gives the time-outs; `now` is the clock that deadlines are in, seconds."""

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
        """In the order in which they were asked for."""
        return list(self._open.values())

    @property
    def ended(self) -> list[EvalRecord]:
        """In the order in which they were asked for."""
        return [self._ended[number] for number in sorted(self._ended)]

    @property
    def records(self) -> list[EvalRecord]:
        return [*(of.record for of in self._open.values()), *self._ended.values()]

    def of(self, number: int) -> OpenEvaluation:
        return self._open[number]

    def ticket(self, ticket_id: str) -> EvalRow | None:
        """The row that a ticket is out for, if it is."""
        return self._tickets.get(ticket_id)

    def was_accepted(self, ticket_id: str) -> bool:
        """Whether a ticket gave its group, as far as that is remembered."""
        return ticket_id in self._accepted

    def held_by(self, worker_id: str) -> list[EvalRow]:
        return [row for row in self._tickets.values() if row.worker_id == worker_id]

    def episodes_of(self, rows: Iterable[EvalRow]) -> int:
        return sum(self._open[row.evaluation].record.group_size for row in rows)

    def renew_ticket(self, ticket_id: str, now: float) -> None:
        self._ticket_deadlines.renew(ticket_id, now)

    def has_outlived(self, ticket_id: str, now: float) -> bool:
        """Whether a ticket that is out is older than any may grow, however often it was renewed."""
        return self._ticket_deadlines.has_outlived(ticket_id, now)

    def expired_tickets(self, now: float) -> list[EvalRow]:
        return [self._tickets[ticket_id] for ticket_id in self._ticket_deadlines.expired(now)]

    def expired(self, now: float) -> list[OpenEvaluation]:
        """Those whose own time is over."""
        return [self._open[number] for number, due in self._deadlines.items() if due <= now]

    def next_deadline(self) -> float:
        """Infinity where nothing is open."""
        return min([self._ticket_deadlines.soonest(), *self._deadlines.values()])

    def apply(self, change: EvalChange, now: float) -> None:
        """Make a change that is on disk take effect."""
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
            while len(self._accepted) > _REMEMBERED:
                del self._accepted[next(iter(self._accepted))]
        if found is None:  # its evaluation ended with it
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
