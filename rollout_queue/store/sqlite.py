"""Stores everything in one SQLite file in WAL mode: a commit survives `kill -9`, payloads stay out of memory.

`synchronous=NORMAL`: a power cut may lose the newest commits, but never leaves half of one.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from protocol.config import ConfigError
from rollout_queue.ledger.records import (
    LIVE,
    EvalRecord,
    GroupFacts,
    RunState,
    SampledBy,
    ServerRecord,
    StoreContents,
    TicketRecord,
    TicketState,
)
from rollout_queue.store.base import LedgerRow, StoreError, StoreSize, hold_lock_file
from rollout_queue.store.changes import Changes, Payload
from rollout_queue.store.migrations import FIRST_LAYOUT, layout_of, migrate, newest_layout

T = TypeVar("T")

MEMORY = ":memory:"
FILE_NAME = "queue.db"

# Errors that pass: the file itself is sound.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

# A group's facts lie flat in its ticket's row. Tickets of evaluations have a table of their own.
_OF_TICKET = tuple(name for name in TicketRecord.__struct_fields__ if name not in ("group", "evaluation", "result"))
_OF_GROUP = GroupFacts.__struct_fields__
_COLUMNS = (*_OF_TICKET, *_OF_GROUP)
_SELECT = "SELECT " + ", ".join(f'"{column}"' for column in _COLUMNS) + " FROM tickets"
_UPSERT = (
    "INSERT OR REPLACE INTO tickets (id, "
    + ", ".join(f'"{column}"' for column in _COLUMNS)
    + ") VALUES ("
    + ", ".join("?" * (len(_COLUMNS) + 1))
    + ")"
)
# Sums of tickets: by state, and of dropped ones by reason.
_SUMMED = """SELECT state, IIF(state = 'dropped', COALESCE(reason, 'unknown'), '') AS label, COUNT(*), SUM(tokens)
    FROM tickets WHERE "index" < ? GROUP BY state, label"""
_PRUNE = (
    f"""INSERT INTO sums {_SUMMED} ON CONFLICT (state, reason) DO UPDATE
        SET tickets = tickets + excluded.tickets, tokens = tokens + excluded.tokens""",
    """DELETE FROM tickets WHERE "index" < ?""",
)
_ALL_SUMS = f"""SELECT state, reason, SUM(tickets), SUM(tokens)
    FROM (SELECT state, reason, tickets, tokens FROM sums UNION ALL {_SUMMED}) GROUP BY state, reason"""
_EVERY_INDEX = 2**63 - 1
_TO_REISSUE = """ AS t WHERE state = 'reissued' AND NOT EXISTS
    (SELECT 1 FROM tickets AS later WHERE later."index" = t."index" AND later.attempt > t.attempt)"""


class SqliteStore:
    """A `Store` in one SQLite file. A lock file allows one writer; `:memory:` keeps nothing on disk."""

    def __init__(self, path: Path | str) -> None:
        """Open, create or migrate the file.

        Raises:
            ConfigError: The file cannot be used.
            StoreError: It cannot be used now, as while another program has it locked.
        """
        self._path = str(path)
        self.blocks = self._path != MEMORY
        with contextlib.ExitStack() as opened:
            if self._path != MEMORY:
                opened.enter_context(_only_queue(Path(path)))
            try:
                # check_same_thread: the broker calls from one thread of an executor, not from the one that opened it.
                db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                self._db = opened.enter_context(contextlib.closing(db))
                _check_layout(db, path)
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.execute("PRAGMA journal_size_limit = 67108864")
                migrate(db, self._path)
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", None) in _PASSING:
                    raise StoreError(
                        f"{path}: cannot be opened now: {error}; end what else has it open, or free its disk, then "
                        f"start the queue again"
                    ) from error
                raise ConfigError(f"{path}: cannot be used as the queue's store: {error}; move it away") from error
            self._opened = opened.pop_all()

    def load(self) -> StoreContents:
        with self._guard():
            marks = ", ".join(f"'{state}'" for state in LIVE)
            row = self._db.execute("SELECT record FROM run").fetchone()
            run = msgspec.json.decode(row[0], type=RunState) if row else RunState()
            issued = self._db.execute("""SELECT COALESCE(MAX("index") + 1, 0) FROM tickets""").fetchone()[0]
            counts: Counter[TicketState] = Counter()
            drops, tokens_sampled = {}, 0
            for state, reason, count, tokens in self._db.execute(_ALL_SUMS, (_EVERY_INDEX,)):
                counts[TicketState(state)] += count
                tokens_sampled += tokens
                if state == TicketState.DROPPED:
                    drops[reason] = count
            servers = self._db.execute("SELECT record FROM servers ORDER BY name")
            return StoreContents(
                run=run,
                live=self._select(f" WHERE state IN ({marks}) ORDER BY serial"),
                to_reissue=self._select(_TO_REISSUE),
                next_index=max(issued, run.pruned_below),
                counts=dict(counts),
                drops=drops,
                tokens_sampled=tokens_sampled,
                servers=[msgspec.json.decode(row[0], type=ServerRecord) for row in servers],
                evaluations=self._decoded("SELECT record FROM evaluations ORDER BY number", EvalRecord),
                evaluation_tickets=self._decoded(
                    """SELECT record FROM evaluation_tickets ORDER BY evaluation, "row" """, TicketRecord
                ),
            )

    def acquire(self) -> str | None:
        return None

    def commit(self, changes: Changes) -> None:
        with self._guard():
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(_UPSERT, map(_row, changes.tickets.values()))
            bodies = ((name, payload.body, payload.checksum) for name, payload in changes.payloads.items())
            self._db.executemany("INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)", bodies)
            self._db.executemany("DELETE FROM payloads WHERE id = ?", ((name,) for name in changes.let_go))
            if changes.run is not None:
                self._db.execute("INSERT OR REPLACE INTO run VALUES (1, ?)", (msgspec.json.encode(changes.run),))
            if changes.prune_below is not None:
                for statement in _PRUNE:
                    self._db.execute(statement, (changes.prune_below,))
            servers = ((name, msgspec.json.encode(record)) for name, record in changes.servers.items())
            self._db.executemany("INSERT OR REPLACE INTO servers VALUES (?, ?)", servers)
            self._put_evaluations(changes)
            self._db.execute("COMMIT")

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, Payload]:
        with self._guard():
            found = {}
            for ticket_id in ticket_ids:
                row = self._db.execute("SELECT body, checksum FROM payloads WHERE id = ?", (ticket_id,)).fetchone()
                if row:
                    found[ticket_id] = Payload(*row)
            return found

    def size(self) -> StoreSize:
        if self._path == MEMORY:
            pages = (
                self._db.execute("PRAGMA page_count").fetchone()[0] * self._db.execute("PRAGMA page_size").fetchone()[0]
            )
            return StoreSize(pages)
        log = Path(f"{self._path}-wal")
        log_bytes = log.stat().st_size if log.exists() else 0
        return StoreSize(Path(self._path).stat().st_size + log_bytes, log_bytes)

    def records(self, ticket_ids: Sequence[str]) -> dict[str, TicketRecord]:
        with self._guard():
            rows = [record for ticket_id in ticket_ids for record in self._select(" WHERE id = ?", ticket_id)]
            return {record.id: record for record in rows}

    def forgotten_after(self, step: int) -> list[TicketRecord]:
        with self._guard():
            return self._select(" WHERE state = 'forgotten' AND step > ?", step)

    def first_forgotten_after(self, step: int) -> int | None:
        with self._guard():
            query = """SELECT MIN("index") FROM tickets WHERE state = 'forgotten' AND step > ?"""
            found: int | None = self._db.execute(query, (step,)).fetchone()[0]
            return found

    def close(self) -> None:
        self._opened.close()

    def _put_evaluations(self, changes: Changes) -> None:
        """Store changes of evaluations. Of each row only the newest ticket is kept, and none once it has ended."""
        records = ((number, msgspec.json.encode(record)) for number, record in changes.evaluations.items())
        self._db.executemany("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", records)
        rows = ((*key, msgspec.json.encode(record)) for key, record in changes.evaluation_tickets.items())
        self._db.executemany("INSERT OR REPLACE INTO evaluation_tickets VALUES (?, ?, ?)", rows)
        self._db.executemany("DELETE FROM evaluation_tickets WHERE evaluation = ?", ((n,) for n in changes.ended))
        self._db.executemany("DELETE FROM evaluations WHERE number = ?", ((n,) for n in changes.forgotten))

    def _decoded(self, query: str, kind: type[T]) -> list[T]:
        return [msgspec.json.decode(row[0], type=kind) for row in self._db.execute(query)]

    def _select(self, where: str, *parameters: object) -> list[TicketRecord]:
        return [_record(row) for row in self._db.execute(_SELECT + where, parameters)]

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"the queue's store {self._path} failed: {error}; free or repair its disk, then start the queue again"
            ) from error
        finally:
            if self._db.in_transaction:
                self._db.rollback()


class SqliteReader:
    """Reads what a run has stored, from a file of this or any older layout, beside a running queue. Changes nothing."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def exists(self) -> bool:
        return self._path.exists()

    def read_ledger(self) -> list[LedgerRow]:
        if not self.exists():
            raise ConfigError(f"{self._path}: there is no ledger; has the run's queue been started?")
        with self._opened("cannot be read as a run's ledger") as db:
            # Columns that every layout has.
            rows = db.execute(
                """SELECT id, "index", state, reason, step, trained_version FROM tickets ORDER BY serial"""
            ).fetchall()
        return [LedgerRow(row[0], row[1], _state_for_people(row[2]), *row[3:]) for row in rows]

    def run_state(self) -> RunState:
        if not self.exists():
            return RunState()
        with self._opened("cannot be read as a run's store", "; move it away") as db:
            run = db.execute("SELECT record FROM run").fetchone() if layout_of(db) else None
        return msgspec.json.decode(run[0], type=RunState) if run else RunState()

    @contextlib.contextmanager
    def _opened(self, fault: str, remedy: str = "") -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                _check_layout(db, self._path)
                yield db
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path}: {fault}: {error}{remedy}") from error


def _state_for_people(state: str) -> TicketState:
    """Show a trained ticket as TRAINED whether or not its payload is still kept."""
    return TicketState.TRAINED if state == TicketState.FORGOTTEN else TicketState(state)


@contextlib.contextmanager
def _only_queue(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(hold_lock_file(path.with_suffix(".lock")))
        except BlockingIOError:
            raise ConfigError(f"{path} is in use by another queue: stop that one, or choose another run.name") from None
        yield


def _check_layout(db: sqlite3.Connection, path: Path | str) -> None:
    """Refuse a file that this release cannot read; raises `ConfigError`."""
    layout, newest = layout_of(db), newest_layout()
    if layout > newest:
        raise ConfigError(
            f"{path}: written by a newer release of Slipstream (layout {layout}, this one knows {newest}): upgrade, or "
            f"move it away"
        )
    if 0 < layout < FIRST_LAYOUT:
        raise ConfigError(
            f"{path}: written by an older checkout of Slipstream (layout {layout}, the oldest known here is "
            f"{FIRST_LAYOUT}): finish the run with that checkout, or choose a new run.name"
        )


def _row(record: TicketRecord) -> tuple[object, ...]:
    values = {name: getattr(record, name) for name in _OF_TICKET}
    values |= {name: getattr(record.group, name) for name in _OF_GROUP}
    values["servers"] = msgspec.json.encode(record.group.servers).decode()
    values["state"] = str(record.state)
    return (record.id, *values.values())


def _record(row: tuple[Any, ...]) -> TicketRecord:
    values = dict(zip(_COLUMNS, row, strict=True))
    values["servers"] = msgspec.json.decode(values["servers"], type=tuple[SampledBy, ...])
    values["state"] = TicketState(values["state"])
    group = GroupFacts(**{name: values.pop(name) for name in _OF_GROUP})
    return TicketRecord(**values, group=group)
