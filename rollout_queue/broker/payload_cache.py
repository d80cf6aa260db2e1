"""A cache of recent payloads, so that groups that are leased soon after they came need not be read from the store."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.rollout_queue.ledger.records import TicketRecord, TicketState

MAX_BYTES = 64 * 1024**2

_LEASABLE = frozenset({TicketState.READY, TicketState.LEASED})


class PayloadCache:
    """Bodies of groups by ticket id, as they were submitted: the newest ones, up to `max_bytes` in total."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bodies: dict[str, bytes] = {}
        self._bytes = 0

    def add(self, ticket_id: str, body: bytes) -> None:
        """Keep a body, and evict the oldest beyond `max_bytes`."""
        self._evict(ticket_id)
        self._bodies[ticket_id] = body
        self._bytes += len(body)
        while self._bytes > self._max_bytes:
            self._evict(next(iter(self._bodies)))

    def get(self, ticket_id: str) -> bytes | None:
        return self._bodies.get(ticket_id)

    def evict_ended(self, records: Iterable[TicketRecord]) -> None:
        """Evict the groups that cannot be leased any more."""
        for record in records:
            if record.state not in _LEASABLE:
                self._evict(record.id)

    def _evict(self, ticket_id: str) -> None:
        self._bytes -= len(self._bodies.pop(ticket_id, b""))
