"""The queue's memory of tickets and groups: records of live ones, and counts of ended ones (I1).

`tickets`, `leases`, `evaluations` and `servers` read it and decide; only `apply` changes records and counts. It holds
no payload. Counts, sums and indices are those of the training: tickets of evaluations are in none of them. Deadlines
are kept here only: after a restart of the queue each ticket, lease and draining server gets its full time again. Times
are seconds of the caller's clock.

Nothing that a request reads costs more with the number of tickets: what is looked up is indexed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable

from slipstream.protocol import reasons
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import TicketCounts
from slipstream.rollout_queue.ledger.deadlines import Deadlines
from slipstream.rollout_queue.ledger.open_evaluations import Evaluations
from slipstream.rollout_queue.ledger.ready_groups import ReadyGroups
from slipstream.rollout_queue.ledger.records import (
    HOLDS_PAYLOAD,
    LIVE,
    OUTSTANDING,
    Decision,
    ServerRecord,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.ledger.row_estimates import RowEstimates

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
        ready: The ready groups, in the order of their leases.
        drains: Draining servers, each with the time that it has left.
        evaluations: The evaluations, with their tickets.
        rows: Estimates of the rows, by which they are chosen; None unless `task.order = "learnable"`.
        tokens_dropped: Sampled tokens of dropped groups, by reason.
    """

    def __init__(self, config: RunConfig, contents: StoreContents, now: float) -> None:
        self.config = config
        self.run = contents.run
        self.next_index = contents.next_index
        self.counts: Counter[TicketState] = Counter(contents.counts)
        self.drops: Counter[str] = Counter(contents.drops)
        self.tokens_sampled = contents.tokens_sampled
        self.tokens_dropped: Counter[str] = Counter(contents.tokens_dropped)
        self.bytes = self.kept_bytes = 0
        self.to_reissue = {record.index: record for record in contents.to_reissue}
        self._rows_to_reissue = sorted(self.to_reissue)
        self._live: dict[str, TicketRecord] = {}
        self._by_state: dict[TicketState, dict[str, TicketRecord]] = {state: {} for state in LIVE}
        self._held: dict[str, dict[str, TicketRecord]] = {}  # issued tickets by worker
        self._leases: dict[str, set[str]] = {}
        self.ready = ReadyGroups()
        self._ticket_deadlines = Deadlines(config.queue.ticket_timeout_s, config.ticket_max_age_s)
        self._lease_deadlines = Deadlines(config.queue.lease_timeout_s)
        self.drains = Deadlines(config.vllm.drain_timeout_s)
        self.evaluations = Evaluations(contents.evaluations, contents.evaluation_tickets, now)
        learnable = config.task.order == "learnable"
        self.rows = RowEstimates(config, contents.rows, contents.run.data) if learnable else None
        for record in sorted(contents.live, key=lambda record: (record.step or 0, record.serial)):
            self._enter(record, now)
        for record in contents.evaluation_tickets:
            self._enter(record, now)
        for server in contents.servers:
            self._watch_drain(server, now)

    def get(self, ticket_id: str, state: TicketState | None = None) -> TicketRecord | None:
        """Return the live ticket of this id, if it is in `state` (None: any)."""
        record = self._live.get(ticket_id)
        return record if record is None or state in (None, record.state) else None

    def tickets(self, state: TicketState) -> Iterable[TicketRecord]:
        """Return the live training tickets in `state`, in the order in which they entered it."""
        return self._by_state[state].values()

    def held_by(self, worker_id: str) -> list[TicketRecord]:
        """Return the tickets of both kinds that a worker holds, those of evaluations first."""
        held = self._held.get(worker_id, {}).values()
        return sorted(held, key=lambda record: (record.evaluation is None, record.evaluation or 0))

    def next_to_reissue(self, count: int) -> list[TicketRecord]:
        """Return the first of `to_reissue`, those with the lowest index, at most `count`."""
        return [self.to_reissue[index] for index in self._rows_to_reissue[:count]]

    def was_pruned(self, ticket_id: str) -> bool:
        """Tell whether a ticket without a record was issued once and is now counted in the sums only."""
        index = ticket_id.partition(".")[0]
        return len(index) < 20 and index.isdecimal() and int(index) < self.run.pruned_below

    def first_needed(self) -> int:
        """Return the lowest index of the training with a live ticket or a row to issue again; else the next index."""
        live = (record.index for record in self._live.values() if record.evaluation is None)
        return min([self.next_index, *self._rows_to_reissue[:1], *live])

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
        """Apply a decision."""
        for record in decision.tickets:
            before = self._live.get(record.id)
            if before is not None and before.state is record.state is TicketState.ISSUED:
                self._keep(record)  # Its time continues.
                continue
            if before is not None:
                self._leave(before)
            self._enter(record, now)
            if record.evaluation is None:
                self._count(before, record)
        for record in self.evaluations.apply(decision, now):
            if record.id in self._live:
                self._leave(record)
        for server in decision.servers:
            self._watch_drain(server, now)
        if decision.run is not None:
            self.run = decision.run
        if self.rows is not None:
            self.rows.apply(decision)

    def _watch_drain(self, record: ServerRecord, now: float) -> None:
        """Start a server's time as it begins to drain."""
        name = record.server.name
        if record.removed or record.server.state is not ServerState.DRAINING:
            self.drains.end(name)
        elif name not in self.drains:
            self.drains.start(name, now)

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
            self._reissued(after.index)
        elif after.state is TicketState.REISSUED:
            self._reissued(after.index)
            self.to_reissue[after.index] = after
            insort(self._rows_to_reissue, after.index)
        elif after.state is TicketState.DROPPED:
            if before is None:
                self._reissued(after.index)
            self.drops[after.reason or "unknown"] += 1
            if after.group.tokens:
                self.tokens_dropped[after.reason or "unknown"] += after.group.tokens
        elif after.state is TicketState.READY and before is not None and before.state is TicketState.ISSUED:
            self.tokens_sampled += after.group.tokens

    def _reissued(self, index: int) -> None:
        """Take a row from those to be issued again, if it is one."""
        if self.to_reissue.pop(index, None) is not None:
            del self._rows_to_reissue[bisect_left(self._rows_to_reissue, index)]

    def _keep(self, record: TicketRecord) -> None:
        self._live[record.id] = record
        if record.evaluation is None:
            self._by_state[record.state][record.id] = record
        if record.state is TicketState.ISSUED:
            self._held.setdefault(record.worker_id, {})[record.id] = record

    def _enter(self, record: TicketRecord, now: float) -> None:
        if record.state not in LIVE:
            return
        self._keep(record)
        if record.state is TicketState.ISSUED:
            self._ticket_deadlines.start(record.id, now)
        elif record.state is TicketState.READY:
            self.ready.add(record)
        self._count_bytes(record, 1)
        if record.lease_id is not None and record.state is TicketState.LEASED:
            self._leases.setdefault(record.lease_id, set()).add(record.id)
            self._lease_deadlines.start(record.lease_id, now)

    def _leave(self, record: TicketRecord) -> None:
        del self._live[record.id]
        self._by_state[record.state].pop(record.id, None)
        if record.state is TicketState.ISSUED:
            self._ticket_deadlines.end(record.id)
            held = self._held[record.worker_id]
            del held[record.id]
            if not held:
                del self._held[record.worker_id]
        elif record.state is TicketState.READY:
            self.ready.remove(record.id)
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
