"""Traces of tickets: a span for each state that a ticket was in, from one decision to the next.

Kept in memory only: the state that a ticket is in when the queue starts begins there in its trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slipstream.protocol import tracing
from slipstream.protocol.tracing import TicketTrace
from slipstream.rollout_queue.ledger.records import OUTSTANDING, TicketRecord, TicketState

# These end a ticket whose group is not trained or evaluated.
_LOST = (TicketState.DROPPED, TicketState.REISSUED)


@dataclass
class TicketSpans:
    """Follows the outstanding tickets. Does nothing while nobody traces."""

    _since: dict[str, tuple[TicketState, float]] = field(default_factory=dict)

    def load(self, records: Iterable[TicketRecord], at: float) -> None:
        """Begin with the tickets of the store. `at`: seconds since the epoch, as in all methods."""
        if tracing.is_on():
            self._since = {record.id: (record.state, at) for record in records if record.state in OUTSTANDING}

    def moved(self, run: str, records: Iterable[TicketRecord], at: float) -> None:
        """Note the new states of tickets. `run`: the run's id."""
        if not tracing.is_on():
            return
        for record in records:
            trace = TicketTrace(run, record.id)
            before = self._since.get(record.id)
            if before is not None and before[0] is record.state:
                continue
            if before is not None:
                state, began = self._since.pop(record.id)
                lost = record.reason or record.state.value if record.state in _LOST else None
                tracing.record(state.value, trace, began, at, failed=lost, **_facts(record))
            elif record.state is TicketState.ISSUED:
                tracing.root(trace, at, **_facts(record))
            if record.state in OUTSTANDING:
                self._since[record.id] = record.state, at


def _facts(record: TicketRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "ticket": record.id,
        "kind": record.kind,
        "index": record.index,
        "worker": record.worker_id,
        "version": record.version,
        "next_state": record.state.value,
    }
    if record.was_accepted:
        group = record.group
        facts |= {"tokens": group.tokens, "servers": list(group.newest), "oldest_version": group.oldest_version}
    if record.lease_id is not None:
        facts["lease"] = record.lease_id
    if record.step is not None and record.trained_version is not None:
        # The step trained at the version before the one that it made.
        facts |= {"step": record.step, "staleness": record.trained_version - 1 - record.group.oldest_version}
    return facts
