"""What happens to a SQLite file on its disk: damage, a deletion under the running queue, a second queue."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.ledger.records import RunState, TicketRecord, TicketState
from slipstream.rollout_queue.store import sql, sqlite, sqlite_file
from slipstream.rollout_queue.store.base import StoreError, Superseded
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.sqlite import SqliteReader, SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME, INDEX, LOG

REMEDY = r"move it away with its queue\.db-wal and queue\.db-shm, put a backup in its place"


def groups(*indices: int) -> Changes:
    tickets = {f"{index}.0": TicketRecord(index, 0, index, "w", 0, TicketState.READY) for index in indices}
    return Changes(tickets=tickets, payloads={name: Payload.of(os.urandom(20_000)) for name in tickets})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    store.acquire()
    store.commit(groups(0))
    yield store
    store.close()


def test_a_second_queue_whose_lock_file_was_deleted_ends_the_first(store: SqliteStore, path: Path) -> None:
    path.with_suffix(".lock").unlink()
    second = SqliteStore(path)
    store.commit(groups(1))
    second.acquire()
    with pytest.raises(Superseded, match=r"another queue has opened .*queue\.db since.*its lock file deleted"):
        store.commit(groups(2))
    second.commit(Changes(run=RunState(version=7)))
    assert set(second.records([f"{index}.0" for index in range(3)])) == {"0.0", "1.0"}
    assert second.load().run.version == 7
    second.close()


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


# SQLite has the index mapped: once it is cut off, the process itself may end.
@pytest.mark.parametrize(
    ("harm", "end"),
    [
        *((harm, end) for harm in (Path.unlink, replace) for end in ("", LOG, INDEX)),
        *((lambda path: os.truncate(path, 0), end) for end in ("", LOG)),
    ],
)
def test_a_file_that_is_deleted_replaced_or_cut_off_ends_the_queue(
    store: SqliteStore, path: Path, harm: Callable[[Path], object], end: str
) -> None:
    harm(Path(f"{path}{end}"))
    with pytest.raises(StoreError, match=rf"queue\.db{end} was deleted, replaced or cut off.*{REMEDY}"):
        store.commit(Changes())


@pytest.mark.parametrize("end", ["", LOG])
def test_a_file_that_loses_its_end_ends_the_queue(store: SqliteStore, path: Path, end: str) -> None:
    store._db.execute("PRAGMA wal_autocheckpoint = 500")
    for index in range(1, 300):  # enough for the log to be written into the file
        store.commit(groups(index))
    file = Path(f"{path}{end}")
    os.truncate(file, file.stat().st_size - 4096)
    with pytest.raises(StoreError, match=rf"queue\.db{end} was deleted, replaced or cut off"):
        store.commit(Changes())


def test_a_log_that_sqlite_itself_cuts_off_does_not(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "KEPT_LOG_BYTES", 100_000)
    store._db.execute("PRAGMA journal_size_limit = 100000")
    store.commit(Changes(tickets=groups(*range(1, 3000)).tickets))
    longest = store.size().log_bytes
    store._db.execute("PRAGMA wal_checkpoint(RESTART)")
    for first in (5000, 6000):
        store.commit(Changes(tickets=groups(*range(first, first + 100)).tickets))
    assert 0 < store.size().log_bytes < longest


def test_a_commit_at_once_waits_for_no_lock_and_for_no_disk(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop makes it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not store.commit_at_once(groups(1))
        monkeypatch.setattr(sqlite, "MAX_LOCKED_MS", 10)
        with pytest.raises(StoreError, match=r"database is locked by another program: end that one"):
            store.commit(groups(2))
    assert not store.records(["1.0", "2.0"])
    monkeypatch.setattr(sqlite, "MAX_LOGGED_ROWS", 100)
    written = path.stat().st_size
    at_once = [store.commit_at_once(groups(index)) for index in range(3, 200)]
    assert at_once.index(False) < 100
    assert not any(at_once[at_once.index(False) :])
    assert path.stat().st_size == written, "a commit at once wrote the log into the file"
    store.commit(groups(200))
    assert path.stat().st_size > written
    assert store.commit_at_once(groups(201))


def test_a_file_that_goes_away_during_a_commit_is_noticed_before_anyone_is_told(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = sql.writes

    def slow_writes(changes: Changes, bodies: bool) -> Iterator[sql.Write]:
        path.unlink()
        return writes(changes, bodies)

    monkeypatch.setattr(sql, "writes", slow_writes)
    with pytest.raises(StoreError, match="was deleted, replaced or cut off"):
        store.commit(groups(5))


def test_a_damaged_file_is_refused_at_the_start_with_the_remedy(store: SqliteStore, path: Path) -> None:
    store.commit(groups(*range(1, 400)))
    root = store._db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'tickets'").fetchone()[0]
    page = store._db.execute("PRAGMA page_size").fetchone()[0]
    store.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * page + 12)
        file.write(os.urandom(200))
    with pytest.raises(ConfigError, match=rf"queue\.db.*(malformed|damaged).*{REMEDY}"):
        SqliteStore(path)


class Impatient(threading.Timer):
    """Is over at once, and again until it is heard."""

    def run(self) -> None:
        while not self.finished.wait(0.0005):
            self.function()


def test_the_look_through_the_groups_of_a_backup_is_bounded_and_says_so(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ((f"{index}.0", os.urandom(20_000)) for index in range(2000))
    store._db.executemany("INSERT INTO payloads (id, body) VALUES (?, ?)", rows)
    store.close()
    monkeypatch.setattr(threading, "Timer", Impatient)
    with caplog.at_level(logging.WARNING):
        again = SqliteStore(path)
    again.close()
    assert "its payloads were looked through for 5 s, not to their end" in caplog.text


def test_a_file_that_was_cut_to_nothing_is_refused_and_not_begun_anew(store: SqliteStore, path: Path) -> None:
    """SQLite itself would delete the log, which still holds everything."""
    log = Path(f"{path}{LOG}")
    kept = log.read_bytes()
    store.close()
    path.write_bytes(b"")
    log.write_bytes(kept)
    with pytest.raises(ConfigError, match=rf"queue\.db is empty, and its queue\.db-wal is not.*{REMEDY}"):
        SqliteStore(path)
    assert log.read_bytes() == kept


def test_a_damaged_file_in_use_ends_the_queue_with_the_remedy(store: SqliteStore, path: Path) -> None:
    store.commit(groups(*range(1, 300)))
    store.close()
    store = SqliteStore(path)
    store._db.execute("PRAGMA shrink_memory")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(StoreError, match=rf"queue\.db is damaged: .*{REMEDY}"):
        store.records([f"{index}.0" for index in range(300)])
    store.close()
    with pytest.raises(ConfigError, match="cannot be read as a run's ledger"):
        SqliteReader(path).read_ledger()


@pytest.mark.parametrize(
    "change",
    ["UPDATE tickets SET state = 'reAdy'", "UPDATE tickets SET servers = '[['", "UPDATE run SET record = '{'"],
)
def test_a_record_whose_bytes_were_changed_is_damage_with_the_remedy(store: SqliteStore, change: str) -> None:
    store.commit(Changes(run=RunState(version=7)))
    store._db.execute(change)
    with pytest.raises(StoreError, match=rf"queue\.db is damaged: .*{REMEDY}"):
        store.load()
