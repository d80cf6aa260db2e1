"""Stores everything in one SQLite file in WAL mode: a commit survives `kill -9`, payloads stay out of memory.

A power cut never leaves half of a commit. It may lose the newest ones, but none before the newest that changed the run,
as each step does (`synchronous=FULL`): a checkpoint is never ahead of the store.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rollout_queue.store.base import StoreSize, Superseded
from rollout_queue.store.changes import Changes
from rollout_queue.store.sql import UNREADABLE, Query, SqlStore, writes
from rollout_queue.store.sqlite_file import LOG, FileWatch, damaged, failed, opened

T = TypeVar("T")


class SqliteStore(SqlStore):
    """A `Store` in one SQLite file. A lock file allows one queue; the owner's epoch holds where that was deleted."""

    def __init__(self, path: Path) -> None:
        """Open, create or migrate the file.

        Raises:
            ConfigError: The file cannot be used.
            StoreError: It cannot be used now, as while another program has it locked.
        """
        self._path = path
        self._epoch = 0
        self._watch: FileWatch | None = None
        self._synced = False
        with contextlib.ExitStack() as stack:
            self._db = stack.enter_context(opened(path))
            self._opened = stack.pop_all()

    def acquire(self) -> str | None:
        with self._guard():
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("UPDATE owner SET epoch = epoch + 1, seen_at = ?", (time.time(),))
            (self._epoch,) = self._db.execute("SELECT epoch FROM owner").fetchone()
            self._db.execute("COMMIT")
            self._watch = FileWatch(self._path)
        return None

    def commit(self, changes: Changes) -> None:
        if self._watch is None:
            raise AssertionError("a store is acquired before the first commit")
        with self._guard():
            self._sync_to_disk(changes.run is not None)
            self._db.execute("BEGIN IMMEDIATE")
            if self._db.execute("SELECT epoch FROM owner").fetchone() != (self._epoch,):
                raise Superseded(
                    f"another queue has opened {self._path} since, though this one still runs: was its lock file "
                    f"deleted? This one has stored nothing more, and ends"
                )
            for write in writes(changes):
                self._db.executemany(write.statement, write.rows)
            self._db.execute("COMMIT")
        # Nothing is answered that went into a file which is gone.
        self._watch.check()

    def size(self) -> StoreSize:
        log = Path(f"{self._path}{LOG}")
        log_bytes = log.stat().st_size if log.exists() else 0
        return StoreSize(self._path.stat().st_size + log_bytes, log_bytes)

    def give_up(self) -> None:
        """Do nothing: a call waits for no connection."""

    def close(self) -> None:
        self._opened.close()

    def _sync_to_disk(self, wanted: bool) -> None:
        if wanted != self._synced:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if wanted else 'NORMAL'}")
            self._synced = wanted

    def _read(self, of: Callable[[Query], T]) -> T:
        with self._guard():
            try:
                return of(self._db.execute)
            except UNREADABLE as error:
                raise damaged(self._path, error) from error

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise failed(self._path, error) from error
        finally:
            if self._db.in_transaction:
                self._db.rollback()
