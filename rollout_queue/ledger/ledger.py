"""The queue's memory of tickets and groups: live ones, and counts of the ended ones.

Holds no payload. `tickets`, `leases` and `servers` read it and decide; `apply` alone changes records and counts.
Deadlines are kept here only: after a restart of the queue each ticket and lease gets its full time again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from protocol.config import RunConfig
from protocol.status import TicketCounts
from rollout_queue.ledger.records import LIVE, OUTSTANDING, Decision, StoreContents, TicketRecord, TicketState


class Ledger:
    """`config` gives the limits and time-outs; `now` is the clock that deadlines are in, seconds."""

    def __init__(self, config: RunConfig, contents: StoreContents, now: float) -> None:
        self.config = config
        self.run = contents.run
        self.next_index = contents.next_index
        self.counts: Counter[TicketState] = Counter(contents.counts)
        self.drops: Counter[str] = Counter(contents.drops)
        self.tokens_sampled = contents.tokens_sampled
        self.bytes = 0
        self.to_reissue = {record.index: record for record in contents.to_reissue}
        self.expired_leases: set[str] = set()
        self._live: dict[str, TicketRecord] = {}
        self._by_state: dict[TicketState, dict[str, TicketRecord]] = {state: {} for state in LIVE}
        self._leases: dict[str, set[str]] = {}
        self._ticket_deadlines: dict[str, float] = {}
        self._lease_deadlines: dict[str, float] = {}
        for record in contents.live:
            self._enter(record, now)

    def get(self, ticket_id: str, state: TicketState | None = None) -> TicketRecord | None:
        """The live ticket of this id, if it is in `state` where one is given."""
        record = self._live.get(ticket_id)
        return record if record is None or state in (None, record.state) else None

    def tickets(self, state: TicketState) -> Iterable[TicketRecord]:
        """The live tickets in `state`, in the order in which they got there."""
        return self._by_state[state].values()

    def leased(self, lease_id: str) -> list[TicketRecord]:
        return [self._live[ticket_id] for ticket_id in sorted(self._leases.get(lease_id, ()))]

    def count(self, state: TicketState) -> int:
        return self.counts[state]

    @property
    def issued(self) -> int:
        """Tickets ever issued: the serial of the next one."""
        return self.counts.total()

    @property
    def outstanding(self) -> int:
        return sum(self.counts[state] for state in OUTSTANDING)

    @property
    def ever_trained(self) -> bool:
        return self.run.version > 0 or self.trained > 0

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
        if ticket_id in self._ticket_deadlines:
            self._ticket_deadlines[ticket_id] = now + self.config.queue.ticket_timeout_s

    def renew_lease(self, lease_id: str, now: float) -> None:
        if lease_id in self._lease_deadlines:
            self._lease_deadlines[lease_id] = now + self.config.queue.lease_timeout_s

    def expired(self, now: float) -> list[TicketRecord]:
        """Issued and leased tickets whose holder was not heard from in time."""
        late = [self._live[ticket_id] for ticket_id, deadline in self._ticket_deadlines.items() if deadline <= now]
        for lease_id, deadline in self._lease_deadlines.items():
            if deadline <= now:
                late += self.leased(lease_id)
        return late

    def next_deadline(self, now: float) -> float:
        """When to look for expired ones again: no deadline that is set later can come before this."""
        soonest = now + min(self.config.queue.ticket_timeout_s, self.config.queue.lease_timeout_s)
        return min([soonest, *self._ticket_deadlines.values(), *self._lease_deadlines.values()])

    def apply(self, decision: Decision, now: float) -> None:
        """Make a decision that is on disk take effect."""
        for record in decision.tickets:
            before = self._live.get(record.id)
            if before is not None:
                self._leave(before)
                self.counts[before.state] -= 1
            elif record.state is TicketState.REISSUED:
                self.counts[TicketState.FORGOTTEN] -= 1
            self.counts[record.state] += 1
            self._enter(record, now)
            self._tally(before, record)
        if decision.run is not None:
            if decision.run.session != self.run.session:
                self.expired_leases.clear()
            self.run = decision.run

    def _tally(self, before: TicketRecord | None, after: TicketRecord) -> None:
        if after.state is TicketState.ISSUED:
            self.next_index = max(self.next_index, after.index + 1)
            self.to_reissue.pop(after.index, None)
        elif after.state is TicketState.REISSUED:
            self.to_reissue[after.index] = after
        elif after.state is TicketState.DROPPED:
            self.drops[after.reason or "unknown"] += 1
        elif after.state is TicketState.READY and before is not None and before.state is TicketState.ISSUED:
            self.tokens_sampled += after.group.tokens

    def _enter(self, record: TicketRecord, now: float) -> None:
        if record.state not in LIVE:
            return
        self._live[record.id] = self._by_state[record.state][record.id] = record
        if record.state is TicketState.ISSUED:
            self._ticket_deadlines[record.id] = now + self.config.queue.ticket_timeout_s
        elif record.state is not TicketState.TRAINED:
            self.bytes += record.group.bytes
        if record.lease_id is not None and record.state is TicketState.LEASED:
            self._leases.setdefault(record.lease_id, set()).add(record.id)
            self._lease_deadlines[record.lease_id] = now + self.config.queue.lease_timeout_s

    def _leave(self, record: TicketRecord) -> None:
        del self._live[record.id], self._by_state[record.state][record.id]
        if record.state is TicketState.ISSUED:
            del self._ticket_deadlines[record.id]
        elif record.state is not TicketState.TRAINED:
            self.bytes -= record.group.bytes
        if record.lease_id is not None and record.state is TicketState.LEASED:
            self._leases[record.lease_id].discard(record.id)
            if not self._leases[record.lease_id]:
                del self._leases[record.lease_id], self._lease_deadlines[record.lease_id]
