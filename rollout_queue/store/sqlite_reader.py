"""Reads the SQLite file of a run beside a running queue, and copies it as a whole."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from protocol.config import ConfigError
from rollout_queue.ledger.records import RunState
from rollout_queue.store import sql
from rollout_queue.store.base import LedgerRow
from rollout_queue.store.migrations import layout_of
from rollout_queue.store.sqlite_file import check_layout


class SqliteReader:
    """A `StoreReader` of a file of this or any older layout. Changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        return self._path.exists()

    def read_ledger(self) -> list[LedgerRow]:
        if not self.exists():
            raise ConfigError(f"{self._path}: there is no ledger; has the run's queue been started?")
        with self._opened("cannot be read as a run's ledger") as db:
            return sql.ledger(db.execute)

    def run_state(self) -> RunState:
        if not self.exists():
            return RunState()
        with self._opened("cannot be read as a run's store", "; move it away") as db:
            return sql.run_state(db.execute) if layout_of(db) else RunState()

    def set_aside(self, name: str) -> None:
        """Do nothing: the file is one of the run directory's."""

    @contextlib.contextmanager
    def _opened(self, fault: str, remedy: str = "") -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                check_layout(db, self._path)
                yield db
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path}: {fault}: {error}{remedy}") from error
