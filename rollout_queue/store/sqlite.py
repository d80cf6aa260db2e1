"""Stores the ledger in one SQLite file in WAL mode, and groups in files next to it: a commit survives `kill -9`.

A power cut never leaves half of a commit. It may lose the newest ones, but none before the newest that changed the run,
as each step does (`synchronous=FULL`): a checkpoint is never ahead of the store.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.ledger.records import RunState
from slipstream.rollout_queue.store import sql
from slipstream.rollout_queue.store.base import LedgerRow, StoreFacts, StoreSize, Superseded, is_held
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.group_files import GroupFiles
from slipstream.rollout_queue.store.migrations import layout_of, newest_layout
from slipstream.rollout_queue.store.sql import UNREADABLE, Query, SqlStore
from slipstream.rollout_queue.store.sqlite_file import (
    INDEX,
    LOG,
    FileWatch,
    check_layout,
    count_rows,
    damaged,
    failed,
    folder_of_links,
    groups_of,
    is_locked,
    only_queue,
    opened,
)

T = TypeVar("T")

# Milliseconds for which another program may keep the file locked. The queue ends after that.
MAX_LOCKED_MS = 5000

# The log is written into the file after so many changed rows; a commit of one ticket writes one to three pages.
MAX_LOGGED_ROWS = 4096


class SqliteStore(SqlStore):
    """A `Store` in a SQLite file and a folder. A lock file allows one queue; its epoch holds where that was deleted."""

    def __init__(self, path: Path) -> None:
        """Open, create or migrate the file.

        Raises:
            ConfigError: The file cannot be used.
            StoreError: It cannot be used now, as while another program has it locked.
        """
        self._path = path
        self._epoch = 0
        self._watch: FileWatch | None = None
        self._pragmas: dict[str, object] = {}
        self._written_out = 0  # rows that were changed before the log was last written into the file
        self._groups = GroupFiles(groups_of(path))
        with contextlib.ExitStack() as stack:
            self._db = stack.enter_context(opened(path))
            self._opened = stack.pop_all()

    def acquire(self) -> str | None:
        with self._guard():
            self._move_bodies_out()
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("UPDATE owner SET epoch = epoch + 1, seen_at = ?", (time.time(),))
            (self._epoch,) = self._db.execute("SELECT epoch FROM owner").fetchone()
            self._groups.keep_only(sql.with_payload(self._db.execute))
            self._db.execute("COMMIT")
            self._watch = FileWatch(self._path)
        return None

    def commit(self, changes: Changes) -> None:
        with self._guard():
            self._commit(changes, MAX_LOCKED_MS)
            if self._log_is_long:
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
                self._written_out = self._db.total_changes

    def commit_at_once(self, changes: Changes) -> bool:
        if self._log_is_long:
            return False
        with self._guard():
            try:
                self._commit(changes, 0)
            except sqlite3.Error as error:
                if not is_locked(error):
                    raise
                return False
        return True

    def payloads(self, ticket_ids: Sequence[str]) -> dict[str, Payload]:
        with self._guard():
            return self._groups.read(ticket_ids)

    def size(self) -> StoreSize:
        log = Path(f"{self._path}{LOG}")
        log_bytes = log.stat().st_size if log.exists() else 0
        return StoreSize(self._path.stat().st_size + log_bytes + self._groups.bytes, log_bytes)

    def give_up(self) -> None:
        """Do nothing: a call waits for no connection."""

    def close(self) -> None:
        self._opened.close()

    def bodies(self) -> Iterator[sql.Row]:
        """Yield the rows of the table `payloads` as they would be if the bodies were in it. Acquire the store first."""
        return rows_of_bodies(self._groups, sql.with_payload(self._db.execute))

    @property
    def _log_is_long(self) -> bool:
        """Whether it is time to write SQLite's log into its file, which waits for the disk."""
        return self._db.total_changes - self._written_out >= MAX_LOGGED_ROWS

    def _commit(self, changes: Changes, max_locked_ms: int) -> None:
        if self._watch is None:
            raise AssertionError("a store is acquired before the first commit")
        self._set("busy_timeout", max_locked_ms)
        self._set("synchronous", "NORMAL" if changes.run is None else "FULL")
        self._db.execute("BEGIN IMMEDIATE")
        if self._db.execute("SELECT epoch FROM owner").fetchone() != (self._epoch,):
            raise Superseded(
                f"another queue has opened {self._path} since, though this one still runs: was its lock file "
                f"deleted? This one has stored nothing more, and ends"
            )
        with self._groups.written(changes.payloads):
            for write in sql.writes(changes, bodies=False):
                self._db.executemany(write.statement, write.rows)
            self._db.execute("COMMIT")
        self._groups.delete(changes.let_go)
        # Nothing is answered that went into a file which is gone.
        self._watch.check()

    def _move_bodies_out(self) -> None:
        """Move bodies that are rows, in a file of an older layout or a backup, to where they belong."""
        if names := [name for (name,) in self._db.execute("SELECT id FROM payloads")]:
            self._db.execute("BEGIN IMMEDIATE")
            self._groups.keep_only(())
            for name in names:
                row = self._db.execute("SELECT body, checksum FROM payloads WHERE id = ?", (name,)).fetchone()
                with self._groups.written({name: Payload(*row)}):
                    pass
            self._db.execute("DELETE FROM payloads")
            self._db.execute("COMMIT")
        free, pages = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_count"))
        if free > pages / 2:  # an earlier start may have been killed before it came to this
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _set(self, name: str, value: object) -> None:
        """Set a PRAGMA, which costs a tenth of a commit, where it differs."""
        if self._pragmas.get(name) != value:
            self._db.execute(f"PRAGMA {name} = {value}")
            self._pragmas[name] = value

    def _read(self, of: Callable[[Query], T]) -> T:
        with self._guard():
            self._set("busy_timeout", MAX_LOCKED_MS)
            try:
                return of(self._db.execute)
            except UNREADABLE as error:
                raise damaged(self._path, error) from error

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise failed(self._path, error) from error
        finally:
            if self._db.in_transaction:
                self._db.rollback()


class SqliteReader:
    """A `StoreReader` of a file of this or any older layout, next to a running queue. Changes nothing."""

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
        with self._opened("cannot be read as a run's store", "; move it away, or mend its disk or its rights") as db:
            return sql.run_state(db.execute) if layout_of(db) else RunState()

    def look(self) -> StoreFacts:
        run, lock, layout = self.run_state(), self._path.with_suffix(".lock"), None
        try:
            queue = "a queue on this machine" if is_held(lock) else None
        except OSError as error:
            raise ConfigError(f"{lock}: cannot be opened: {error.strerror}; give this user the right to") from error
        if self.exists():
            with self._opened("cannot be read as a run's store") as db:
                layout = layout_of(db)
        return StoreFacts(str(self._path), layout, newest_layout(), run, queue)

    def copy_into(self, target: sqlite3.Connection) -> dict[str, int]:
        if not self.exists():
            raise ConfigError(f"{self._path}: there is no store; has the run's queue been started?")
        groups, missing = GroupFiles(groups_of(self._path)), None
        with self._opened("cannot be read as a run's store") as db, folder_of_links(self._path) as folder:
            copied = GroupFiles(folder)
            while True:
                db.execute("BEGIN")
                rows, held = count_rows(db), sql.with_payload(db.execute)
                groups.link_into(folder)
                copied.read_places()
                # A queue that runs may have deleted some since: then a later state, for which the others are kept.
                before, missing = missing, {name for name in held if name not in copied}
                if not missing or missing == before:
                    break
                db.execute("ROLLBACK")
            db.backup(target)
            target.execute("BEGIN")
            bodies = rows_of_bodies(copied, held)
            rows["payloads"] += max(0, target.executemany(sql.insert("payloads"), bodies).rowcount)
            target.execute("COMMIT")
        return rows

    def set_aside(self, folder: Path) -> None:
        with only_queue(self._path):
            beside = (Path(f"{self._path}{end}") for end in (LOG, INDEX))
            for path in (self._path, *beside, groups_of(self._path)):
                if path.exists():
                    try:
                        path.rename(folder / path.name)
                    except OSError as error:
                        raise ConfigError(f"{path}: cannot be moved to {folder}: {error.strerror}") from error

    @contextlib.contextmanager
    def _opened(self, fault: str, remedy: str = "") -> Iterator[sqlite3.Connection]:
        try:
            uri = f"{self._path.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
                check_layout(db, self._path)
                yield db
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path}: {fault}: {error}{remedy}") from error


def rows_of_bodies(groups: GroupFiles, ticket_ids: Iterable[str]) -> Iterator[sql.Row]:
    """Yield rows of the table `payloads`, one in memory at a time. Tickets without a body are left out."""
    for name in ticket_ids:
        for payload in groups.read([name]).values():
            yield name, payload.body, payload.checksum
