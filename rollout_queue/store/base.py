"""What the broker asks of a store. Calls block; the broker makes them one at a time, from one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from protocol.client import QueueError
from rollout_queue.ledger.records import Decision, StoreContents, TicketRecord


class StoreError(QueueError):
    """The store failed; its text names the file and the remedy. The queue stops rather than diverge from it."""


class Store(Protocol):
    """Records and payloads. Every method raises `StoreError`."""

    def load(self) -> StoreContents:
        """Everything that the queue keeps in memory."""
        ...

    def commit(self, decision: Decision, payloads: Mapping[str, bytes]) -> None:
        """Store a decision and new payloads by ticket id, all or nothing, safe from a crash of the process.

        The payload of a ticket that ends goes with it.
        """
        ...

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, bytes]:
        """The groups of these tickets as they were submitted; those that are gone are left out."""
        ...

    def records(self, ticket_ids: Sequence[str]) -> dict[str, TicketRecord]:
        """The records of these tickets, ended ones too; those never issued are left out."""
        ...

    def forgotten_after(self, step: int) -> list[TicketRecord]:
        """The forgotten tickets that were trained at a step above `step`."""
        ...

    def close(self) -> None: ...
