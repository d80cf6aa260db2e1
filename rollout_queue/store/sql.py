"""Statements and rows of the SQL stores: what SQLite and PostgreSQL both understand, and records as rows.

Parameters are written `?`. `tests/rollout_queue/store/test_query_plans.py` keeps the statements of a commit from
scanning a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from slipstream.rollout_queue.ledger.records import (
    HOLDS_PAYLOAD,
    LIVE,
    EvalRecord,
    GroupFacts,
    RowRecord,
    RunState,
    SampledBy,
    ServerRecord,
    StoreContents,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.store.base import LedgerRow
from slipstream.rollout_queue.store.changes import Changes, Payload

T = TypeVar("T")
Row = tuple[Any, ...]
# Runs one statement with its parameters.
Query = Callable[[str, Sequence[object]], Iterable[Row]]

# A group's facts lie flat in its ticket's row. Tickets of evaluations have their own table.
_OF_TICKET = tuple(name for name in TicketRecord.__struct_fields__ if name not in ("group", "evaluation", "result"))
_OF_GROUP = GroupFacts.__struct_fields__
_COLUMNS = (*_OF_TICKET, *_OF_GROUP)

# Every table that holds what the ledger knows, with its columns and its key. `owner` is the store's own.
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tickets": (("id", *_COLUMNS), ("id",)),
    "payloads": (("id", "body", "checksum"), ("id",)),
    "servers": (("name", "record"), ("name",)),
    "run": (("one", "record"), ("one",)),
    "sums": (("state", "reason", "tickets", "tokens"), ("state", "reason")),
    "evaluations": (("number", "record"), ("number",)),
    "evaluation_tickets": (("evaluation", "row", "record"), ("evaluation", "row")),
    "row_estimates": (RowRecord.__struct_fields__, ("row",)),
}

# A ticket's place never changes: an update that left it out spares the index over it.
_NEVER_CHANGED = {"index", "attempt"}

# Raised by a row that is no record: its bytes were changed in a way that the database does not see.
UNREADABLE = (ValueError, msgspec.DecodeError)

# Sums of tickets: by state, and of dropped ones by reason. `state || ''` is no column: grouped by the column itself,
# SQLite would walk the index over it through the whole table, however few tickets are below the mark.
_SUMMED = """SELECT state || '' AS state, CASE WHEN state = 'dropped' THEN COALESCE(reason, 'unknown') ELSE '' END AS
    reason, COUNT(*) AS tickets, CAST(SUM(tokens) AS BIGINT) AS tokens FROM tickets WHERE "index" < ? GROUP BY 1, 2"""
PRUNE = (
    f"""INSERT INTO sums (state, reason, tickets, tokens) {_SUMMED} ON CONFLICT (state, reason) DO UPDATE
        SET tickets = sums.tickets + excluded.tickets, tokens = sums.tokens + excluded.tokens""",
    """DELETE FROM tickets WHERE "index" < ?""",
)
_ALL_SUMS = f"""SELECT state, reason, CAST(SUM(tickets) AS BIGINT), CAST(SUM(tokens) AS BIGINT)
    FROM (SELECT state, reason, tickets, tokens FROM sums UNION ALL {_SUMMED}) AS every_sum GROUP BY state, reason"""
_EVERY_INDEX = 2**63 - 1
_TO_REISSUE = """ AS t WHERE state = 'reissued' AND NOT EXISTS
    (SELECT 1 FROM tickets AS later WHERE later."index" = t."index" AND later.attempt > t.attempt)"""
_FORGOTTEN_AFTER = " WHERE state = 'forgotten' AND step > ?"
_FIRST_FORGOTTEN_AFTER = f"""SELECT MIN("index") FROM tickets{_FORGOTTEN_AFTER}"""

# Columns that every layout has.
LEDGER = """SELECT id, "index", state, reason, step, trained_version FROM tickets ORDER BY serial"""
RUN = "SELECT record FROM run"

# Ids that one statement asks for at most. Their number is made a power of two, by repeating the last: a statement is
# prepared once, and would be another one for each number.
_IDS = 128


def quoted(columns: Iterable[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def insert(table: str) -> str:
    """Return the statement that adds a row to a table of `TABLES`."""
    columns, _ = TABLES[table]
    return f"INSERT INTO {table} ({quoted(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _in_state(states: Iterable[TicketState]) -> str:
    return f"state IN ({', '.join(repr(str(state)) for state in sorted(states))})"


def _upsert(table: str) -> str:
    columns, key = TABLES[table]
    others = [column for column in columns if column not in {*key, *_NEVER_CHANGED}]
    changes = ", ".join(f'"{column}" = excluded."{column}"' for column in others)
    return f"{insert(table)} ON CONFLICT ({quoted(key)}) DO UPDATE SET {changes}"


_UPSERT = {table: _upsert(table) for table in TABLES}

_SELECT = f"SELECT {quoted(_COLUMNS)} FROM tickets"

_ROWS = f"""SELECT {quoted(RowRecord.__struct_fields__)} FROM row_estimates ORDER BY "row" """

_LIVE = f" WHERE {_in_state(LIVE)} ORDER BY serial"


class Write(NamedTuple):
    """A statement, and the parameters of each time that it is run."""

    statement: str
    rows: Sequence[Row]


def writes(changes: Changes, bodies: bool = True) -> Iterator[Write]:
    """Return what a commit runs, in this order; nothing for what did not change.

    Args:
        bodies: Whether the bodies of groups are rows, too.
    """
    found = (
        Write(_UPSERT["tickets"], [_row(record) for record in changes.tickets.values()]),
        Write(_UPSERT["payloads"], [(name, of.body, of.checksum) for name, of in changes.payloads.items() if bodies]),
        Write("DELETE FROM payloads WHERE id = ?", [(name,) for name in changes.let_go if bodies]),
        Write(_UPSERT["run"], [(1, msgspec.json.encode(changes.run))] if changes.run is not None else []),
        *(Write(prune, [(changes.prune_below,)] if changes.prune_below is not None else []) for prune in PRUNE),
        Write(_UPSERT["servers"], [(name, msgspec.json.encode(of)) for name, of in changes.servers.items()]),
        Write(_UPSERT["evaluations"], [(key, msgspec.json.encode(of)) for key, of in changes.evaluations.items()]),
        # Of each row only the newest ticket is kept, and none once its evaluation has ended.
        Write(
            _UPSERT["evaluation_tickets"],
            [(*key, msgspec.json.encode(of)) for key, of in changes.evaluation_tickets.items()],
        ),
        Write("DELETE FROM evaluation_tickets WHERE evaluation = ?", [(number,) for number in changes.ended]),
        Write("DELETE FROM evaluations WHERE number = ?", [(number,) for number in changes.forgotten]),
        Write(_UPSERT["row_estimates"], [msgspec.structs.astuple(record) for record in changes.rows.values()]),
    )
    return (write for write in found if write.rows)


class SqlStore(ABC):
    """The reading half of a `Store` over SQL."""

    blocks = True
    has_standbys = False

    @abstractmethod
    def _read(self, of: Callable[[Query], T]) -> T:
        """Call `of` with what runs its statements, all of which see one state of the store. Raises `StoreError`."""

    def load(self) -> StoreContents:
        return self._read(_contents)

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, Payload]:
        rows = self._read(partial(_by_id, "SELECT id, body, checksum FROM payloads", ticket_ids))
        return {name: Payload(body, checksum) for name, body, checksum in rows}

    def records(self, ticket_ids: Sequence[str]) -> dict[str, TicketRecord]:
        rows = self._read(lambda query: [_record(row) for row in _by_id(_SELECT, ticket_ids, query)])
        found = {record.id: record for record in rows}
        return {name: found[name] for name in ticket_ids if name in found}

    def forgotten_after(self, step: int) -> list[TicketRecord]:
        return self._read(lambda query: [_record(row) for row in query(_SELECT + _FORGOTTEN_AFTER, (step,))])

    def first_forgotten_after(self, step: int) -> int | None:
        ((found,),) = self._read(lambda query: list(query(_FIRST_FORGOTTEN_AFTER, (step,))))
        return None if found is None else int(found)


def ledger(query: Query) -> list[LedgerRow]:
    """Return every ticket. TRAINED and FORGOTTEN, whose payload is deleted, are the same to a reader."""

    def state(text: str) -> TicketState:
        return TicketState.TRAINED if text == TicketState.FORGOTTEN else TicketState(text)

    return [LedgerRow(row[0], row[1], state(row[2]), *row[3:]) for row in query(LEDGER, ())]


def with_payload(query: Query) -> set[str]:
    """Return the ids of the tickets whose groups are held."""
    return {name for (name,) in query(f"SELECT id FROM tickets WHERE {_in_state(HOLDS_PAYLOAD)}", ())}


def run_state(query: Query) -> RunState:
    records = _decoded(query(RUN, ()), RunState)
    return records[0] if records else RunState()


def _contents(query: Query) -> StoreContents:
    run = run_state(query)
    ((issued,),) = query("""SELECT COALESCE(MAX("index") + 1, 0) FROM tickets""", ())
    counts: Counter[TicketState] = Counter()
    drops, tokens_dropped, tokens_sampled = {}, {}, 0
    for state, reason, count, tokens in query(_ALL_SUMS, (_EVERY_INDEX,)):
        counts[TicketState(state)] += count
        tokens_sampled += tokens
        if state == TicketState.DROPPED:
            drops[reason] = count
            if tokens:
                tokens_dropped[reason] = tokens
    return StoreContents(
        run=run,
        live=[_record(row) for row in query(_SELECT + _LIVE, ())],
        to_reissue=[_record(row) for row in query(_SELECT + _TO_REISSUE, ())],
        next_index=max(issued, run.pruned_below),
        counts=dict(counts),
        drops=drops,
        tokens_sampled=tokens_sampled,
        servers=_decoded(query("SELECT record FROM servers ORDER BY name", ()), ServerRecord),
        evaluations=_decoded(query("SELECT record FROM evaluations ORDER BY number", ()), EvalRecord),
        evaluation_tickets=_decoded(
            query("""SELECT record FROM evaluation_tickets ORDER BY evaluation, "row" """, ()), TicketRecord
        ),
        rows=[RowRecord(*row) for row in query(_ROWS, ())],
        tokens_dropped=tokens_dropped,
    )


def _by_id(select: str, ids: Sequence[str], query: Query) -> list[Row]:
    found: list[Row] = []
    for first in range(0, len(ids), _IDS):
        some = list(ids[first : first + _IDS])
        some += some[-1:] * ((1 << (len(some) - 1).bit_length()) - len(some))
        found += query(f"{select} WHERE id IN ({', '.join('?' * len(some))})", some)
    return found


def _decoded(rows: Iterable[Row], kind: type[T]) -> list[T]:
    return [msgspec.json.decode(row[0], type=kind) for row in rows]


def _row(record: TicketRecord) -> Row:
    group = record.group
    return (
        record.id,
        *(getattr(record, name) if name != "state" else str(record.state) for name in _OF_TICKET),
        *(getattr(group, name) for name in _OF_GROUP if name != "servers"),
        msgspec.json.encode(group.servers).decode(),
    )


def _record(row: Row) -> TicketRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    values["servers"] = msgspec.json.decode(values["servers"], type=tuple[SampledBy, ...])
    values["state"] = TicketState(values["state"])
    group = GroupFacts(**{name: values.pop(name) for name in _OF_GROUP})
    return TicketRecord(**values, group=group)
