"""The SQLite file: one writer, older layouts migrated, unknown ones refused, audits next to a running queue."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.deploy.commands.look import print_ledger
from slipstream.protocol.config import ConfigError
from slipstream.rollout_queue.ledger.records import (
    HOLDS_PAYLOAD,
    GroupFacts,
    RowResult,
    RunState,
    SampledBy,
    TicketRecord,
    TicketState,
)
from slipstream.rollout_queue.store import migrations
from slipstream.rollout_queue.store.base import LedgerRow, StoreError
from slipstream.rollout_queue.store.changes import Changes, Payload
from slipstream.rollout_queue.store.migrations import FIRST_LAYOUT, Migration, layout_of, newest_layout
from slipstream.rollout_queue.store.sqlite import SqliteReader, SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME
from tests.kit import config

NEXT = Migration(
    "notes are kept; rows are untouched",
    ("CREATE TABLE notes (text TEXT)", "ALTER TABLE tickets ADD COLUMN note TEXT"),
)
BEFORE = newest_layout()
# Every way to read a file, each of which refuses a layout that it does not know.
READS: tuple[Callable[[Path], Any], ...] = (
    SqliteStore,
    lambda path: SqliteReader(path).read_ledger(),
    lambda path: SqliteReader(path).run_state(),
)
ISSUED = Changes(tickets={"4.1": TicketRecord(index=4, attempt=1, serial=0, worker_id="w", version=0)})
GROUP = GroupFacts(300, 6, 3, (SampledBy("vllm-0", 3, 4),))


def records() -> tuple[TicketRecord, ...]:
    """One ticket in each state of a run at step 4 with a checkpoint of step 2."""

    def of(index: int, state: TicketState, *groups: GroupFacts, **fields: Any) -> TicketRecord:
        return TicketRecord(index, 0, index, "w", 3, state=state, group=groups[0] if groups else GroupFacts(), **fields)

    return (
        of(0, TicketState.FORGOTTEN, GROUP, step=1, trained_version=1),
        of(1, TicketState.REISSUED, reason="expired", failures=1),
        of(2, TicketState.TRAINED, GROUP, step=3, trained_version=3),
        of(3, TicketState.READY, GROUP, arrival_version=4),
        of(4, TicketState.LEASED, GROUP, arrival_version=4, lease_id="l"),
        of(5, TicketState.ISSUED),
        of(6, TicketState.DROPPED, reason="failed:judge", failures=3),
    )


@pytest.fixture
def store_file(tmp_path: Path) -> Path:
    """A file of the newest layout that a queue has used."""
    path = tmp_path / FILE_NAME
    store = SqliteStore(path)
    run = RunState(version=4, step=4, total_steps=9, session=2, checkpoint_step=2)
    held = {record.id: Payload.of(b"group") for record in records() if record.state in HOLDS_PAYLOAD}
    store.acquire()
    store.commit(Changes(tickets={record.id: record for record in records()}, payloads=held, run=run))
    store.close()
    return path


@pytest.fixture
def next_layout(store_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that adds a layout to that of `store_file`."""
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, NEXT))


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return [f"layout {layout_of(db)}", *db.iterdump()]


@pytest.mark.usefixtures("next_layout")
def test_a_migrated_file_keeps_what_it_held_and_has_the_layout_of_a_new_one(store_file: Path, tmp_path: Path) -> None:
    store = SqliteStore(store_file)
    assert store.acquire() is None
    found = store.records([record.id for record in records()])
    assert tuple(found.values()) == records()
    held = {record.id for record in records() if record.state in HOLDS_PAYLOAD}
    assert store.payloads([*found]) == dict.fromkeys(held, Payload.of(b"group"))
    assert store.load().run.version == 4
    store.close()
    new_file = tmp_path / "new" / FILE_NAME
    SqliteStore(new_file).close()
    with closing(sqlite3.connect(store_file)) as old, closing(sqlite3.connect(new_file)) as new:
        assert layout_of(old) == layout_of(new) == newest_layout() == BEFORE + 1
        assert schema(old) == schema(new)


def test_rows_of_an_open_evaluation_become_tickets_and_training_tickets_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout 5 kept rows of evaluations as records of their own."""
    path = tmp_path / FILE_NAME
    row = {"evaluation": 2, "attempt": 1, "serial": 7, "worker_id": "w", "version": 4, "failures": 1, "reason": None}
    result = {"rewards": [0.5, 1], "components": {"r": 0.75}, "lengths": [3, 4], "finished": {"stop": 2}}
    rows = [
        {**row, "index": 0, "state": "done", "result": {**result, "servers": [["vllm-0", 3, 4]]}},
        {**row, "index": 1, "state": "again", "reason": "expired", "result": None},
        {**row, "index": 2, "state": "failed", "reason": "failed:row", "result": None},
        {**row, "index": 3, "state": "issued", "result": None},
    ]
    with monkeypatch.context() as older, closing(sqlite3.connect(path, isolation_level=None)) as db:
        older.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        migrations.migrate(db, "queue.db")
        db.execute(
            """INSERT INTO tickets (id, "index", attempt, state, tokens, servers)
               VALUES ('0.0', 0, 0, 'issued', 0, '[]')"""
        )
        stored = [(of["evaluation"], of["index"], json.dumps(of).encode()) for of in rows]
        db.executemany("INSERT INTO evaluation_rows VALUES (?, ?, ?)", stored)
    with closing(SqliteStore(path)) as store:
        found = store.load().evaluation_tickets
        assert store.records(["0.0"])["0.0"].state is TicketState.ISSUED
    assert [(ticket.id, str(ticket.state), ticket.reason) for ticket in found] == [
        ("e2.0.1", "evaluated", None),
        ("e2.1.1", "reissued", "expired"),
        ("e2.2.1", "dropped", "failed:row"),
        ("e2.3.1", "issued", None),
    ]
    done = found[0]
    assert done.was_accepted
    assert done.group.servers == (SampledBy("vllm-0", 3, 4),)
    assert done.result == RowResult((0.5, 1.0), {"r": 0.75}, (3, 4), {"stop": 2})
    assert {(ticket.serial, ticket.worker_id, ticket.version, ticket.failures) for ticket in found} == {(7, "w", 4, 1)}


def schema(db: sqlite3.Connection) -> list[tuple[str, str]]:
    found = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
    return [(name, "".join(sql.split())) for name, sql in found]


def migrate_and_die(path: Path, at: int) -> int:
    """Migrate in a process that is killed as it begins its statement number `at`, from 1; its exit code."""
    child = os.fork()  # no new interpreter: there are dozens of statements
    if not child:
        code = 1
        try:
            db = sqlite3.connect(path, isolation_level=None)
            begun = []

            def kill(sql: str) -> None:
                begun.append(sql)
                if len(begun) == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            db.set_trace_callback(kill)
            migrations.migrate(db, "queue.db")
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.usefixtures("next_layout")
def test_a_migration_that_is_killed_leaves_the_old_layout_whole(store_file: Path) -> None:
    before = dump(store_file)
    assert before[0] == f"layout {BEFORE}"
    statements = 1 + len(("BEGIN", *NEXT.statements, "user_version", "COMMIT"))
    for at in range(2, statements + 1):
        assert migrate_and_die(store_file, at) == -signal.SIGKILL
        assert dump(store_file) == before, f"killed at statement {at}"
    assert migrate_and_die(store_file, statements + 1) == 0
    assert dump(store_file)[0] == f"layout {BEFORE + 1}"


@pytest.mark.usefixtures("next_layout")
def test_a_new_file_whose_making_was_killed_is_made_when_it_is_opened_again(tmp_path: Path) -> None:
    """Between its steps a new file is an empty one of an older layout."""
    for at in (4, 9, 10, 13, 14, 16):
        path = tmp_path / f"{at}.db"
        assert migrate_and_die(path, at) == -signal.SIGKILL
        store = SqliteStore(path)
        store.acquire()
        store.commit(ISSUED)
        store.close()


@pytest.mark.usefixtures("next_layout")
def test_a_user_is_told_what_a_migration_did(store_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    SqliteStore(store_file).close()
    assert f"migrated to layout {BEFORE + 1}: notes are kept" in caplog.text
    caplog.clear()
    SqliteStore(store_file).close()
    assert caplog.text == ""


def test_a_file_from_before_the_first_release_is_refused_with_the_remedy_and_left_alone(store_file: Path) -> None:
    with closing(sqlite3.connect(store_file)) as db:
        db.execute(f"PRAGMA user_version = {FIRST_LAYOUT - 1}")
    before = dump(store_file)
    for read in READS:
        with pytest.raises(
            ConfigError, match=rf"queue\.db.*layout {FIRST_LAYOUT - 1}.*finish the run with that checkout"
        ):
            read(store_file)
    assert dump(store_file) == before


def test_a_file_of_a_newer_release_is_refused_with_the_remedy_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {newest_layout() + 1}")
    before = dump(path)
    for read in READS:
        with pytest.raises(ConfigError, match=rf"queue\.db.*layout {newest_layout() + 1}.*upgrade, or move it away"):
            read(path)
    assert dump(path) == before


def test_one_run_directory_has_one_queue(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match="in use by another queue"):
        SqliteStore(tmp_path / FILE_NAME)
    first.close()
    SqliteStore(tmp_path / FILE_NAME).close()


@pytest.mark.parametrize("use", [SqliteStore, lambda path: SqliteReader(path).set_aside(path.parent)])
def test_bad_input_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path, use: Callable[[Path], Any]) -> None:
    (tmp_path / "queue.lock").mkdir()
    with pytest.raises(ConfigError, match=r"queue\.lock: cannot be written: .*; give this user the right to"):
        use(tmp_path / FILE_NAME)


def test_bad_input_a_file_that_is_not_a_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"this is no database, but long enough to look like a file")
    with pytest.raises(ConfigError, match=r"queue\.db.*move it away"):
        SqliteStore(path)
    with pytest.raises(ConfigError, match=r"queue\.db.*cannot be read as a run's ledger"):
        SqliteReader(path).read_ledger()
    path.unlink()
    SqliteStore(path).close()


@pytest.mark.usefixtures("next_layout")
def test_a_store_that_another_program_writes_to_is_not_called_broken(
    store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Move it away" would lose the ledger; and the queue may be started again."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.1))  # sqlite waits 5 s for the lock
    other = sqlite3.connect(store_file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StoreError, match="cannot be opened now: database is locked; end what else has it open"):
            SqliteStore(store_file)
    finally:
        other.close()
    SqliteStore(store_file).close()


def test_the_ledger_can_be_read_beside_a_running_queue(tmp_path: Path) -> None:
    path = tmp_path / "50% #1?" / FILE_NAME
    store = SqliteStore(path)
    store.acquire()
    store.commit(ISSUED)
    assert SqliteReader(path).read_ledger() == [LedgerRow("4.1", 4, TicketState.ISSUED, None, None, None)]
    store.close()


@pytest.mark.usefixtures("next_layout")
def test_the_ledger_of_an_older_layout_can_be_read_and_stays_as_it_is(store_file: Path) -> None:
    before = dump(store_file)
    rows = SqliteReader(store_file).read_ledger()
    assert [row.ticket_id for row in rows] == [record.id for record in records()]
    assert rows[2] == LedgerRow("2.0", 2, TicketState.TRAINED, None, 3, 3)
    assert SqliteReader(store_file).run_state().version == 4
    assert dump(store_file) == before


def test_slipstream_ledger_says_trained_whether_or_not_the_payload_was_let_go(store_file: Path) -> None:
    trained = {row.ticket_id: (row.state, row.step) for row in SqliteReader(store_file).read_ledger() if row.trained}
    assert trained == {"0.0": (TicketState.TRAINED, 1), "2.0": (TicketState.TRAINED, 3)}


def test_slipstream_ledger_prints_every_ticket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(run={"dir": str(tmp_path), "name": "audit"})
    with pytest.raises(ConfigError, match=r"there is no ledger"):
        print_ledger(run)
    store = SqliteStore(run.run_dir / FILE_NAME)
    store.acquire()
    store.commit(ISSUED)
    store.close()
    print_ledger(run)
    assert [json.loads(line)["ticket_id"] for line in capsys.readouterr().out.splitlines()] == ["4.1"]
    with pytest.raises(ConfigError, match=r'queue.store = ":memory:" keeps no ledger'):
        print_ledger(config(run={"dir": str(tmp_path), "name": "audit"}, queue={"store": ":memory:"}))
