"""Reads what the queues of a run have stored in PostgreSQL, next to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store import sql
from slipstream.rollout_queue.store.base import LedgerRow, StoreFacts
from slipstream.rollout_queue.store.migrations import migrate
from slipstream.rollout_queue.store.postgres_database import (
    HOLDER,
    LAYOUTS,
    Connection,
    Database,
    adapted,
    has_schema,
    layout_of,
    one_line,
    schema_of,
    try_lock,
    unlock,
)

T = TypeVar("T")

# Rows that are in memory at a time while a store is copied: a group may have tens of megabytes.
_ROWS = 8


class PostgresReader:
    """A `StoreReader`. It takes no lock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def exists(self) -> bool:
        with self._opened() as db:
            return has_schema(db)

    def read_ledger(self) -> list[LedgerRow]:
        found = self._read(sql.ledger)
        if found is None:
            raise ConfigError(f"{self._database.name}: there is no ledger; has the run's queue been started?")
        return found

    def run_state(self) -> RunState:
        return self._read(sql.run_state) or RunState()

    def look(self) -> StoreFacts:
        run, place = self.run_state(), self._database.name
        with self._opened() as db:
            if not has_schema(db):
                return StoreFacts(place, None, len(LAYOUTS))
            held = db.execute(HOLDER, (self._database.schema,)).fetchall()
            ((url,),) = db.execute(b"SELECT url FROM owner")
            queue = f"the queue at {url or 'an unknown address'}" if held else None
            return StoreFacts(place, layout_of(db), len(LAYOUTS), run, queue)

    def copy_into(self, target: sqlite3.Connection) -> dict[str, int]:
        migrate(target, "a new file")
        rows = {}
        with self._opened() as db:
            if not has_schema(db):
                raise ConfigError(f"{self._database.name}: there is no store; has the run's queue been started?")
            db.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            target.execute("BEGIN")
            with db.transaction():  # of one state, while a queue continues
                for table, (columns, _) in sql.TABLES.items():
                    with db.cursor("rows") as cursor:
                        cursor.itersize = _ROWS
                        cursor.execute(f"SELECT {sql.quoted(columns)} FROM {table}".encode(), binary=True)
                        rows[table] = target.executemany(sql.insert(table), cursor).rowcount
            target.execute("COMMIT")
        return {table: max(0, number) for table, number in rows.items()}

    def set_aside(self, folder: Path) -> None:
        with self._opened() as db:
            if not has_schema(db):
                return
            if not try_lock(db, self._database.schema):
                raise ConfigError(f"{self._database.name} is in use by another queue: stop that one")
            taken = schema_of(f"{self._database.run}_{folder.name}")
            db.execute(f'ALTER SCHEMA "{self._database.schema}" RENAME TO "{taken}"'.encode())
            unlock(db)

    def _read(self, of: Callable[[sql.Query], T]) -> T | None:
        """Call `of` with what runs its statements; return None if there is no schema."""
        with self._opened() as db:
            return of(partial(_query, db)) if has_schema(db) else None

    @contextmanager
    def _opened(self) -> Iterator[Connection]:
        try:
            db = self._database.open()
        except psycopg.Error as error:
            raise ConfigError(
                f"{self._database.name}: cannot be reached: {one_line(error)}; start PostgreSQL, or mend queue.store"
            ) from error
        try:
            yield db
        except psycopg.Error as error:
            raise ConfigError(f"{self._database.name}: cannot be read: {one_line(error)}") from error
        finally:
            db.close()


def _query(db: Connection, statement: str, parameters: Any) -> list[tuple[Any, ...]]:
    return db.execute(adapted(statement), parameters, binary=True).fetchall()
