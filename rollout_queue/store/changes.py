"""Changes of one commit: the records of one or several decisions, new payloads, and what is deleted by it.

Decided here for every store: which payloads are let go, and which tickets become sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import crc32c
import msgspec

from slipstream.rollout_queue.ledger.records import (
    HOLDS_PAYLOAD,
    Decision,
    EvalRecord,
    RowRecord,
    RunState,
    ServerRecord,
    TicketRecord,
)


class Payload(msgspec.Struct, frozen=True):
    """A group as submitted, in bytes, and its CRC32C; None for one stored before checksums were kept."""

    body: bytes
    checksum: int | None

    @classmethod
    def of(cls, body: bytes) -> Self:
        return cls(body, crc32c.crc32c(body))

    @property
    def sound_body(self) -> bytes | None:
        """The body; None if it is not what was submitted."""
        return self.body if self.checksum is None or crc32c.crc32c(self.body) == self.checksum else None


class Changes(msgspec.Struct, frozen=True):
    """Everything that one commit writes, all or nothing.

    Attributes:
        tickets: Training tickets by id; each replaces the record before it.
        payloads: New groups by ticket id.
        let_go: Ids of tickets whose payloads are deleted.
        run: The run, if it changed.
        prune_below: Training tickets with an index below it become sums; None if none do.
        servers: Servers by name.
        evaluations: Evaluations by number.
        evaluation_tickets: The newest ticket of each row, by evaluation and row.
        ended: Numbers of evaluations whose tickets are deleted: they ended or are forgotten.
        forgotten: Numbers of evaluations whose records are deleted, too.
        rows: Estimates by row.
    """

    tickets: Mapping[str, TicketRecord] = {}
    payloads: Mapping[str, Payload] = {}
    let_go: frozenset[str] = frozenset()
    run: RunState | None = None
    prune_below: int | None = None
    servers: Mapping[str, ServerRecord] = {}
    evaluations: Mapping[int, EvalRecord] = {}
    evaluation_tickets: Mapping[tuple[int, int], TicketRecord] = {}
    ended: frozenset[int] = frozenset()
    forgotten: frozenset[int] = frozenset()
    rows: Mapping[int, RowRecord] = {}

    @classmethod
    def of(cls, decisions: Sequence[Decision], payloads: Mapping[str, Payload], pruned_below: int = 0) -> Self:
        """Return what decisions write that were made one after the other.

        Args:
            decisions: In the order in which they were made.
            payloads: New groups of all of them, by ticket id.
            pruned_below: `RunState.pruned_below` in the store, before the first of them.
        """
        tickets: dict[str, TicketRecord] = {}
        run: RunState | None = None
        servers: dict[str, ServerRecord] = {}
        evaluations: dict[int, EvalRecord] = {}
        of_evaluations: dict[tuple[int, int], TicketRecord] = {}
        rows: dict[int, RowRecord] = {}
        ended: set[int] = set()
        forgotten: set[int] = set()
        for decision in decisions:
            for record in decision.tickets:
                if record.evaluation is None:
                    tickets[record.id] = record
                else:
                    of_evaluations[record.evaluation, record.index] = record
            run = decision.run or run
            servers.update((record.server.name, record) for record in decision.servers)
            evaluations.update((record.number, record) for record in decision.evaluations)
            ended.update(record.number for record in decision.evaluations if record.result is not None)
            forgotten.update(decision.forgotten)
            rows.update((record.row, record) for record in decision.rows)
        let_go = frozenset(
            name for name, record in tickets.items() if record.was_accepted and record.state not in HOLDS_PAYLOAD
        )
        return cls(
            tickets=tickets,
            payloads={name: payload for name, payload in payloads.items() if name not in let_go},
            let_go=let_go,
            run=run,
            prune_below=run.pruned_below if run is not None and run.pruned_below > pruned_below else None,
            servers=servers,
            evaluations={number: record for number, record in evaluations.items() if number not in forgotten},
            evaluation_tickets={
                key: record for key, record in of_evaluations.items() if key[0] not in ended | forgotten
            },
            ended=frozenset(ended | forgotten),
            forgotten=frozenset(forgotten),
            rows=rows,
        )
