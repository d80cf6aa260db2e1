"""Reads what the queues of a run have stored in PostgreSQL, beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import psycopg

from protocol.config import ConfigError
from rollout_queue.ledger.records import RunState
from rollout_queue.store import sql
from rollout_queue.store.base import LedgerRow
from rollout_queue.store.postgres_database import (
    Connection,
    Database,
    adapted,
    has_schema,
    one_line,
)

T = TypeVar("T")


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

    def _read(self, of: Callable[[sql.Query], T]) -> T | None:
        """Call `of` with what runs its statements; return None if there is no schema."""
        with self._opened() as db:
            return of(partial(_query, db)) if has_schema(db) else None

    @contextmanager
    def _opened(self) -> Iterator[Connection]:
        db = self._database.open()
        try:
            yield db
        except psycopg.Error as error:
            raise ConfigError(f"{self._database.name}: cannot be read: {one_line(error)}") from error
        finally:
            db.close()


def _query(db: Connection, statement: str, parameters: Any) -> list[tuple[Any, ...]]:
    return db.execute(adapted(statement), parameters, binary=True).fetchall()
