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
from rollout_queue.store.sqlite_file import INDEX, LOG, check_layout, count_rows, only_queue


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

    def copy_into(self, target: sqlite3.Connection) -> dict[str, int]:
        if not self.exists():
            raise ConfigError(f"{self._path}: there is no store; has the run's queue been started?")
        with self._opened("cannot be read as a run's store") as db:
            db.execute("BEGIN")
            rows = count_rows(db)
            db.backup(target)
        return rows

    def set_aside(self, folder: Path) -> None:
        with only_queue(self._path):
            for path in (self._path, *(Path(f"{self._path}{end}") for end in (LOG, INDEX))):
                if path.exists():
                    try:
                        path.rename(folder / path.name)
                    except OSError as error:
                        raise ConfigError(f"{path}: cannot be moved to {folder}: {error.strerror}") from error

    @contextlib.contextmanager
    def _opened(self, fault: str, remedy: str = "") -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                check_layout(db, self._path)
                yield db
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path}: {fault}: {error}{remedy}") from error
