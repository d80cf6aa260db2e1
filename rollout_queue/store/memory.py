"""Keeps everything in this process's memory, for throw-away runs and for tests."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence

from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.ledger.records import (
    LIVE,
    EvalRecord,
    RowRecord,
    RunState,
    ServerRecord,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.store.base import LedgerRow, StoreFacts, StoreSize
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.sqlite import SqliteReader


class MemoryStore:
    """A `Store` of dictionaries. It shares its records with the ledger, and no other queue can open it."""

    blocks = False
    has_standbys = False

    def __init__(self) -> None:
        self._run = RunState()
        self._tickets: dict[str, TicketRecord] = {}
        # Attempts of each index, and the index below which tickets are sums.
        self._attempts: dict[int, int] = {}
        self._pruned_below = 0
        self._sums = _Sums()
        self._payloads: dict[str, Payload] = {}
        self._bytes = 0
        self._servers: dict[str, ServerRecord] = {}
        self._evaluations: dict[int, EvalRecord] = {}
        self._evaluation_tickets: dict[int, dict[int, TicketRecord]] = {}
        self._rows: dict[int, RowRecord] = {}

    def acquire(self) -> str | None:
        return None

    def load(self) -> StoreContents:
        sums = self._sums.copy()
        sums.add(self._tickets.values())
        newest = {record.index: record for record in sorted(self._tickets.values(), key=lambda each: each.attempt)}
        return StoreContents(
            run=self._run,
            live=sorted(
                (record for record in self._tickets.values() if record.state in LIVE), key=lambda of: of.serial
            ),
            to_reissue=[record for record in newest.values() if record.state is TicketState.REISSUED],
            next_index=max(self._pruned_below, 1 + max(newest, default=-1), self._run.pruned_below),
            counts=dict(sums.counts),
            drops=dict(sums.drops),
            tokens_sampled=sums.tokens,
            servers=[self._servers[name] for name in sorted(self._servers)],
            evaluations=[self._evaluations[number] for number in sorted(self._evaluations)],
            evaluation_tickets=[
                rows[row] for _, rows in sorted(self._evaluation_tickets.items()) for row in sorted(rows)
            ],
            rows=[self._rows[row] for row in sorted(self._rows)],
            tokens_dropped=dict(sums.dropped_tokens),
        )

    def commit(self, changes: Changes) -> None:
        self._tickets.update(changes.tickets)
        for record in changes.tickets.values():
            self._attempts[record.index] = max(self._attempts.get(record.index, 0), record.attempt + 1)
        for name in [*changes.let_go, *changes.payloads]:
            if (old := self._payloads.pop(name, None)) is not None:
                self._bytes -= len(old.body)
        self._payloads.update(changes.payloads)
        self._bytes += sum(len(payload.body) for payload in changes.payloads.values())
        self._run = changes.run or self._run
        if changes.prune_below is not None:
            self._prune(changes.prune_below)
        self._servers.update(changes.servers)
        self._evaluations.update(changes.evaluations)
        for (evaluation, row), record in changes.evaluation_tickets.items():
            self._evaluation_tickets.setdefault(evaluation, {})[row] = record
        for number in changes.ended:
            self._evaluation_tickets.pop(number, None)
        for number in changes.forgotten:
            self._evaluations.pop(number, None)
        self._rows.update(changes.rows)

    def commit_at_once(self, changes: Changes) -> bool:
        self.commit(changes)
        return True

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, Payload]:
        return {name: self._payloads[name] for name in ticket_ids if name in self._payloads}

    def records(self, ticket_ids: Sequence[str]) -> dict[str, TicketRecord]:
        return {name: self._tickets[name] for name in ticket_ids if name in self._tickets}

    def forgotten_after(self, step: int) -> list[TicketRecord]:
        return [
            record
            for record in self._tickets.values()
            if record.state is TicketState.FORGOTTEN and record.step is not None and record.step > step
        ]

    def first_forgotten_after(self, step: int) -> int | None:
        return min((record.index for record in self.forgotten_after(step)), default=None)

    def size(self) -> StoreSize:
        """Return the bytes of the payloads: the records are the ledger's."""
        return StoreSize(self._bytes)

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _prune(self, below: int) -> None:
        names = (
            f"{index}.{attempt}"
            for index in range(self._pruned_below, below)
            for attempt in range(self._attempts.pop(index, 0))
        )
        self._sums.add(record for name in names if (record := self._tickets.pop(name, None)) is not None)
        self._pruned_below = max(self._pruned_below, below)


class _Sums:
    """Sums of tickets: by state, of dropped ones by reason, and of sampled tokens."""

    def __init__(self) -> None:
        self.counts: Counter[TicketState] = Counter()
        self.drops: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        self.tokens = 0

    def copy(self) -> _Sums:
        other = _Sums()
        other.counts, other.drops, other.tokens = Counter(self.counts), Counter(self.drops), self.tokens
        other.dropped_tokens = Counter(self.dropped_tokens)
        return other

    def add(self, records: Iterable[TicketRecord]) -> None:
        for record in records:
            self.counts[record.state] += 1
            self.tokens += record.group.tokens
            if record.state is TicketState.DROPPED:
                self.drops[record.reason or "unknown"] += 1
                if record.group.tokens:
                    self.dropped_tokens[record.reason or "unknown"] += record.group.tokens


class MemoryReader(SqliteReader):
    """Reads what an earlier start of the run may have left in its file: a store in memory leaves nothing."""

    def read_ledger(self) -> list[LedgerRow]:
        raise ConfigError('queue.store = ":memory:" keeps no ledger: choose "sqlite" to be able to read it later')

    def look(self) -> StoreFacts:
        return StoreFacts("memory", None, 0)

    def copy_into(self, target: sqlite3.Connection) -> dict[str, int]:
        raise ConfigError('queue.store = ":memory:" keeps nothing that could be copied: choose "sqlite"')
