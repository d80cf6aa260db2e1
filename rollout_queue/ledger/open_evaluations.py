"""The queue's memory of evaluations: the tickets of the open ones with their sums, and the results of the ended ones.

Only `Evaluations.apply` changes it. Deadlines of evaluations are kept here only: after a restart of the queue, each
evaluation gets its full time again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from copy import deepcopy

from slipstream.protocol import reasons
from slipstream.protocol.running import Running
from slipstream.protocol.status import Ended, Evaluation
from slipstream.rollout_queue.ledger.records import Decision, EvalRecord, TicketRecord, TicketState

# Finish reasons that mean that the policy was cut off.
_CUT_OFF = ("length", "context")

# So many accepted tickets are remembered, to recognise a group that is submitted again.
_MAX_ACCEPTED = 4096


class EvalTally:
    """Adds up ended rows, each once. The cost of `evaluation` does not grow with their number.

    Attributes:
        failures: Failed rows by reason.
        newest: The newest version by which each server sampled a row that is done.
    """

    def __init__(self, tickets: Iterable[TicketRecord] = ()) -> None:
        self.failures: Counter[str] = Counter()
        self.newest: dict[str, int] = {}
        self._rewards, self._best = Running(), Running()
        self._components: defaultdict[str, Running] = defaultdict(Running)
        self._rollouts = self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._versions: tuple[int, int] | None = None
        for record in tickets:
            self.add(record)

    @property
    def ended(self) -> int:
        """Return the number of rows that are done or failed."""
        return self._rewards.count + self.failures.total()

    def add(self, ticket: TicketRecord) -> None:
        """Count a ticket if its row has ended by it."""
        if ticket.state is TicketState.DROPPED:
            self.failures[ticket.reason or reasons.OTHER] += 1
        if ticket.state is not TicketState.EVALUATED or (result := ticket.result) is None:
            return
        self._rewards.add(math.fsum(result.rewards) / len(result.rewards))
        self._best.add(max(result.rewards) if result.best is None else result.best)
        for name, value in result.components.items():
            self._components[name].add(value)
        self._rollouts += len(result.rewards)
        self._tokens += sum(result.lengths)
        self._finished.update(result.finished)
        for server, version in ticket.group.newest.items():
            self.newest[server] = max(version, self.newest.get(server, version))
        versions = [version for by in ticket.group.servers for version in (by.oldest, by.newest)]
        seen = [*versions, *(self._versions or ())]
        self._versions = (min(seen), max(seen)) if seen else None

    def and_also(self, tickets: Iterable[TicketRecord]) -> EvalTally:
        """Return a copy of this tally with further tickets."""
        more = deepcopy(self)
        for record in tickets:
            more.add(record)
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
            reward=self._rewards.mean,
            reward_std=self._rewards.std,
            rewards={name: of.mean for name, of in self._components.items() if of.mean is not None},
            best=self._best.mean if record.group_size > 1 else None,
            mean_length=self._tokens / self._rollouts if self._rollouts else None,
            clipped=cut_off / self._rollouts if self._rollouts else None,
            finished=dict(self._finished),
            versions=self._versions,
        )


class OpenEvaluation:
    """Holds an evaluation that has not ended. Reading tickets in one state costs nothing for those in another.

    Attributes:
        record: Its record.
        tickets: The newest ticket of each row that was issued, by row.
    """

    def __init__(self, record: EvalRecord, tickets: Iterable[TicketRecord] = ()) -> None:
        self.record = record
        self.tickets: dict[int, TicketRecord] = {}
        self._by_state: defaultdict[TicketState, dict[int, TicketRecord]] = defaultdict(dict)
        self._tally: EvalTally | None = EvalTally()
        for ticket in tickets:
            self.put(ticket)

    @property
    def to_reissue(self) -> dict[int, TicketRecord]:
        """The tickets whose rows wait to be issued again, by row."""
        return self._by_state[TicketState.REISSUED]

    @property
    def tally(self) -> EvalTally:
        """Sums of the rows that have ended."""
        if self._tally is None:
            self._tally = EvalTally(self.tickets.values())
        return self._tally

    def in_state(self, state: TicketState) -> Iterable[TicketRecord]:
        """Return the tickets in `state`, in the order in which they entered it."""
        return self._by_state[state].values()

    def put(self, ticket: TicketRecord) -> None:
        """Take a ticket in place of the one before it of the same row."""
        before = self.tickets.get(ticket.index)
        if before is not None:
            del self._by_state[before.state][before.index]
        self.tickets[ticket.index] = self._by_state[ticket.state][ticket.index] = ticket
        if before is not None and before.state is TicketState.EVALUATED:
            self._tally = None  # A failed proof takes many rows back. They are added up again once, when it is read.
        elif self._tally is not None:
            self._tally.add(ticket)


class Evaluations:
    """Keeps the open evaluations, and the newest ended ones.

    Args:
        records: The evaluations that the store held at the start.
        tickets: The tickets of those that are open.
        now: Current time of the clock for deadlines, seconds.
    """

    def __init__(self, records: Iterable[EvalRecord] = (), tickets: Iterable[TicketRecord] = (), now: float = 0.0):
        self._open: dict[int, OpenEvaluation] = {}
        self._ended: dict[int, EvalRecord] = {}
        self._deadlines: dict[int, float] = {}
        self._accepted: dict[str, None] = {}
        in_order = sorted(records, key=lambda record: record.number)
        self.apply(Decision(tuple(tickets), evaluations=tuple(in_order)), now)

    @property
    def open(self) -> list[OpenEvaluation]:
        """The open evaluations in the order of their requests."""
        return list(self._open.values())

    @property
    def ended(self) -> list[EvalRecord]:
        """The records of the ended evaluations in the order of their requests."""
        return [self._ended[number] for number in sorted(self._ended)]

    @property
    def records(self) -> list[EvalRecord]:
        """The records of all evaluations, the open ones first."""
        return [*(of.record for of in self._open.values()), *self._ended.values()]

    def record_of(self, ticket: TicketRecord) -> EvalRecord | None:
        """Return the evaluation of a ticket that is out; None for a training ticket."""
        return None if ticket.evaluation is None else self._open[ticket.evaluation].record

    def tickets(self, state: TicketState) -> list[TicketRecord]:
        """Return the tickets of open evaluations that are in `state`."""
        return [ticket for of in self._open.values() for ticket in of.in_state(state)]

    def sampled_by(self, server: str, oldest: int) -> list[TicketRecord]:
        """Return the evaluated tickets of evaluations of which a server sampled tokens by version `oldest` or newer."""
        concerned = (of for of in self._open.values() if of.tally.newest.get(server, -1) >= oldest)
        return [ticket for of in concerned for ticket in of.in_state(TicketState.EVALUATED)]

    def was_accepted(self, ticket_id: str) -> bool:
        """Return whether a ticket's group was accepted. Only the newest accepted tickets are remembered."""
        return ticket_id in self._accepted

    def expired(self, now: float) -> list[OpenEvaluation]:
        """Return the open evaluations that have passed their deadline."""
        return [self._open[number] for number, due in self._deadlines.items() if due <= now]

    def next_deadline(self) -> float:
        """Return the first deadline of an evaluation; infinity if none is open."""
        return min(self._deadlines.values(), default=math.inf)

    def apply(self, decision: Decision, now: float) -> list[TicketRecord]:
        """Apply a decision. Returns the tickets that are forgotten by it."""
        for record in decision.evaluations:
            if record.result is None:
                self._keep_open(record, now)
        for ticket in decision.tickets:
            if ticket.evaluation is not None:
                self._put(ticket.evaluation, ticket)
        gone = [ticket for number in decision.forgotten for ticket in self._end(number)]
        for record in decision.evaluations:
            if record.result is not None:
                gone += self._end(record.number)
                self._ended[record.number] = record
        for number in decision.forgotten:
            self._ended.pop(number, None)
        return gone

    def _keep_open(self, record: EvalRecord, now: float) -> None:
        if record.number in self._open:
            self._open[record.number].record = record
        else:
            self._open[record.number] = OpenEvaluation(record)
            self._deadlines[record.number] = now + record.timeout_s

    def _put(self, number: int, ticket: TicketRecord) -> None:
        if ticket.state is TicketState.EVALUATED:
            self._accepted[ticket.id] = None
            while len(self._accepted) > _MAX_ACCEPTED:
                del self._accepted[next(iter(self._accepted))]
        if number in self._open:
            self._open[number].put(ticket)

    def _end(self, number: int) -> list[TicketRecord]:
        self._deadlines.pop(number, None)
        ended = self._open.pop(number, None)
        return [] if ended is None else list(ended.tickets.values())
