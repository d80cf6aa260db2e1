"""The queue's memory of tickets and groups: records of live ones, and counts of ended ones (I1).

`tickets`, `leases`, `evaluations` and `servers` read it and decide; only `apply` changes records and counts. It holds
no payload. Counts, sums and indices are those of the training: tickets of evaluations are in none of them. Deadlines
are kept here only: after a restart of the queue each ticket and lease gets its full time again. Times are seconds of
the caller's clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain

from protocol import reasons
from protocol.config import RunConfig
from protocol.status import TicketCounts
from rollout_queue.ledger.open_evaluations import Evaluations
from rollout_queue.ledger.records import (
    HOLDS_PAYLOAD,
    LIVE,
    OUTSTANDING,
    Decision,
    StoreContents,
    TicketRecord,
    TicketState,
)


class Deadlines:
    """Deadlines of tickets or leases, by id.

    Args:
        timeout_s: Time from the start or the latest renewal, seconds.
        max_age_s: Time from the start, however often it was renewed, seconds.
    """

    def __init__(self, timeout_s: float, max_age_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._due: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    def start(self, name: str, now: float) -> None:
        """Start the time of an id; one that was out already starts anew."""
        self._ends[name] = now + self._max_age_s
        self._due[name] = min(now + self._timeout_s, self._ends[name])

    def renew(self, name: str, now: float) -> None:
        """Renew an id, since its holder was heard from. Nothing happens to one that is not out."""
        if name in self._due:
            self._due[name] = min(now + self._timeout_s, self._ends[name])

    def end(self, name: str) -> None:
        """End an id, if it is out."""
        self._due.pop(name, None)
        self._ends.pop(name, None)

    def has_outlived(self, name: str, now: float) -> bool:
        """Tell whether an id has reached its maximum age. Raises KeyError if it is not out."""
        return self._ends[name] <= now

    def expired(self, now: float) -> list[str]:
        """Return the ids whose time is over, in the order of their starts."""
        return [name for name, due in self._due.items() if due <= now]

    def soonest(self) -> float:
        """Return the first deadline; infinity if nothing is out."""
        return min(self._due.values(), default=math.inf)


# A client's own reason becomes a label of the metrics: both its length and the number of them are bounded.
_MAX_REASON_CHARACTERS = 80

_MAX_CLIENT_REASONS = 64


class Ledger:
    """Tickets and groups in memory.

    Args:
        config: Gives the limits and time-outs.
        contents: What the store held at the start.
        now: Current time of the clock that deadlines are in, seconds.

    Attributes:
        bytes: Bytes of ready and leased groups, which bound what is accepted.
        kept_bytes: Those of trained groups besides, which a resume may bring back.
        to_reissue: Ended training tickets whose rows wait to be issued again, by index.
        evaluations: The evaluations, with their tickets.
    """

    def __init__(self, config: RunConfig, contents: StoreContents, now: float) -> None:
        self.config = config
        self.run = contents.run
        self.next_index = contents.next_index
        self.counts: Counter[TicketState] = Counter(contents.counts)
        self.drops: Counter[str] = Counter(contents.drops)
        self.tokens_sampled = contents.tokens_sampled
        self.bytes = self.kept_bytes = 0
        self.to_reissue = {record.index: record for record in contents.to_reissue}
        self._live: dict[str, TicketRecord] = {}
        self._by_state: dict[TicketState, dict[str, TicketRecord]] = {state: {} for state in LIVE}
        self._leases: dict[str, set[str]] = {}
        self._ticket_deadlines = Deadlines(config.queue.ticket_timeout_s, config.ticket_max_age_s)
        self._lease_deadlines = Deadlines(config.queue.lease_timeout_s)
        self.evaluations = Evaluations(contents.evaluations, contents.evaluation_tickets, now)
        for record in sorted(contents.live, key=lambda record: (record.step or 0, record.serial)):
            self._enter(record, now)
        for record in contents.evaluation_tickets:
            self._enter(record, now)

    def get(self, ticket_id: str, state: TicketState | None = None) -> TicketRecord | None:
        """Return the live ticket of this id, if it is in `state` (None: any)."""
        record = self._live.get(ticket_id)
        return record if record is None or state in (None, record.state) else None

    def tickets(self, state: TicketState) -> Iterable[TicketRecord]:
        """Return the live training tickets in `state`, in the order in which they entered it."""
        return self._by_state[state].values()

    def held_by(self, worker_id: str) -> list[TicketRecord]:
        """Return the tickets of both kinds that a worker holds, those of evaluations first."""
        issued = chain(self.evaluations.tickets(TicketState.ISSUED), self.tickets(TicketState.ISSUED))
        return [record for record in issued if record.worker_id == worker_id]

    def was_pruned(self, ticket_id: str) -> bool:
        """Tell whether a ticket without a record was issued once and is now counted in the sums only."""
        index = ticket_id.partition(".")[0]
        return len(index) < 20 and index.isdecimal() and int(index) < self.run.pruned_below

    def first_needed(self) -> int:
        """Return the lowest index of the training with a live ticket or a row to issue again; else the next index."""
        live = (record.index for record in self._live.values() if record.evaluation is None)
        return min([self.next_index, *self.to_reissue, *live])

    def oldest_serial(self) -> int:
        """Return the lowest serial of the live tickets; the next one if there are none."""
        return min((record.serial for record in self._live.values()), default=self.issued)

    def label(self, reason: str, among: Iterable[str] = ()) -> str:
        """Return the label to count a drop by: a reason of ours or one of a client's first few; OTHER for the rest.

        Args:
            among: Labels that the same decision has used already.
        """
        reason = reason[:_MAX_REASON_CHARACTERS]
        known = {*self.drops, *among}
        if reason in known or reasons.is_ours(reason) or len(known) < _MAX_CLIENT_REASONS:
            return reason
        return reasons.OTHER

    def leased(self, lease_id: str) -> list[TicketRecord]:
        return [self._live[ticket_id] for ticket_id in sorted(self._leases.get(lease_id, ()))]

    def count(self, state: TicketState) -> int:
        return self.counts[state]

    @property
    def issued(self) -> int:
        """Number of training tickets ever issued, which is the serial of the next one."""
        return self.counts.total()

    @property
    def outstanding(self) -> int:
        return sum(self.counts[state] for state in OUTSTANDING)

    @property
    def ever_trained(self) -> bool:
        return self.run.version > 0 or self.trained > 0

    @property
    def ever_accepted(self) -> bool:
        return self.ever_trained or self.tokens_sampled > 0

    @property
    def trained(self) -> int:
        return self.counts[TicketState.TRAINED] + self.counts[TicketState.FORGOTTEN]

    def summary(self) -> TicketCounts:
        return TicketCounts(
            issued=self.issued,
            trained=self.trained,
            dropped=self.counts[TicketState.DROPPED],
            reissued=self.counts[TicketState.REISSUED],
            outstanding=self.outstanding,
        )

    def renew_ticket(self, ticket_id: str, now: float) -> None:
        self._ticket_deadlines.renew(ticket_id, now)

    def has_outlived(self, ticket_id: str, now: float) -> bool:
        """Tell whether an issued ticket has reached the maximum age, however often it was renewed."""
        return self._ticket_deadlines.has_outlived(ticket_id, now)

    def renew_lease(self, lease_id: str, now: float) -> None:
        self._lease_deadlines.renew(lease_id, now)

    def expired(self, now: float) -> list[TicketRecord]:
        """Return issued and leased tickets whose holder was not heard from in time."""
        late = [self._live[ticket_id] for ticket_id in self._ticket_deadlines.expired(now)]
        for lease_id in self._lease_deadlines.expired(now):
            late += self.leased(lease_id)
        return late

    def next_deadline(self, now: float) -> float:
        """Return when to look for expired tickets again: no deadline that is set later can come before it."""
        queue = self.config.queue
        shortest = (queue.ticket_timeout_s, queue.lease_timeout_s, self.config.ticket_max_age_s)
        soonest = now + min(*shortest, self.config.eval.timeout_s)
        deadlines = (self._ticket_deadlines, self._lease_deadlines)
        return min(soonest, self.evaluations.next_deadline(), *(of.soonest() for of in deadlines))

    def apply(self, decision: Decision, now: float) -> None:
        """Apply a decision that the store has committed."""
        for record in decision.tickets:
            before = self._live.get(record.id)
            if before is not None and before.state is record.state is TicketState.ISSUED:
                self._live[record.id] = record  # Its time goes on.
                continue
            if before is not None:
                self._leave(before)
            self._enter(record, now)
            if record.evaluation is None:
                self._count(before, record)
        for record in self.evaluations.apply(decision, now):
            if record.id in self._live:
                self._leave(record)
        if decision.run is not None:
            self.run = decision.run

    def _count(self, before: TicketRecord | None, after: TicketRecord) -> None:
        """Count a change of a training ticket. `before`: its record, if it was live."""
        if before is not None:
            self.counts[before.state] -= 1
        elif after.state is TicketState.REISSUED:
            self.counts[TicketState.FORGOTTEN] -= 1
        elif after.state is TicketState.DROPPED:
            self.counts[TicketState.REISSUED] -= 1
        self.counts[after.state] += 1
        if after.state is TicketState.ISSUED:
            self.next_index = max(self.next_index, after.index + 1)
            self.to_reissue.pop(after.index, None)
        elif after.state is TicketState.REISSUED:
            self.to_reissue[after.index] = after
        elif after.state is TicketState.DROPPED:
            if before is None:
                del self.to_reissue[after.index]
            self.drops[after.reason or "unknown"] += 1
        elif after.state is TicketState.READY and before is not None and before.state is TicketState.ISSUED:
            self.tokens_sampled += after.group.tokens

    def _enter(self, record: TicketRecord, now: float) -> None:
        if record.state not in LIVE:
            return
        self._live[record.id] = record
        if record.evaluation is None:
            self._by_state[record.state][record.id] = record
        if record.state is TicketState.ISSUED:
            self._ticket_deadlines.start(record.id, now)
        self._count_bytes(record, 1)
        if record.lease_id is not None and record.state is TicketState.LEASED:
            self._leases.setdefault(record.lease_id, set()).add(record.id)
            self._lease_deadlines.start(record.lease_id, now)

    def _leave(self, record: TicketRecord) -> None:
        del self._live[record.id]
        self._by_state[record.state].pop(record.id, None)
        if record.state is TicketState.ISSUED:
            self._ticket_deadlines.end(record.id)
        self._count_bytes(record, -1)
        if record.lease_id is not None and record.state is TicketState.LEASED:
            self._leases[record.lease_id].discard(record.id)
            if not self._leases[record.lease_id]:
                del self._leases[record.lease_id]
                self._lease_deadlines.end(record.lease_id)

    def _count_bytes(self, record: TicketRecord, sign: int) -> None:
        if record.state in HOLDS_PAYLOAD:
            self.kept_bytes += sign * record.group.bytes
            if record.state is not TicketState.TRAINED:
                self.bytes += sign * record.group.bytes
