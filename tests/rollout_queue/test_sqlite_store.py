"""The SQLite file: one writer, old layouts migrated, newer ones refused, audits beside a running queue."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.commands.look import print_ledger
from protocol import codec, reasons
from protocol.client import QueueClient
from protocol.config import ConfigError
from protocol.messages import BeginSession, Group, LeaseAck, LeaseRequest, Server, ServerState, TicketRequest
from rollout_queue.ledger import leases, tickets
from rollout_queue.ledger.ledger import Ledger
from rollout_queue.ledger.records import (
    LIVE,
    Decision,
    Distrust,
    Refusal,
    RunState,
    SampledBy,
    ServerRecord,
    TicketRecord,
    TicketState,
)
from rollout_queue.ledger.servers import ServerRegistry
from rollout_queue.store import migrations
from rollout_queue.store.base import LedgerRow, StoreError
from rollout_queue.store.migrations import LAYOUT, MIGRATIONS, layout_of
from rollout_queue.store.sqlite import FILE_NAME, MEMORY, SqliteReader, SqliteStore
from tests.kit import config, group
from tests.kit.queue import serving

# The schema of the release that wrote layout 1.
LAYOUT_1 = """
CREATE TABLE tickets (
    id TEXT PRIMARY KEY, "index" INT, attempt INT, serial INT, worker_id TEXT, version INT, state TEXT, failures INT,
    reason TEXT, lease_id TEXT, bytes INT, tokens INT, oldest_version INT, newest_version INT, arrival_version INT,
    servers TEXT, step INT, trained_version INT, UNIQUE ("index", attempt)
) WITHOUT ROWID;
CREATE INDEX tickets_by_state ON tickets (state, step);
CREATE TABLE payloads (id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE servers (name TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE run (one INTEGER PRIMARY KEY CHECK (one = 1), record BLOB NOT NULL);
PRAGMA user_version = 1;
"""
RUN = RunState(version=4, step=4, total_steps=9, session=2, checkpoint_step=2, staleness_max=1)
SERVER = ServerRecord(
    Server("vllm-0", "http://s:1", ServerState.SERVING, 4, None, 7.5), True, (Distrust(2, 3),), proven=4
)
OLD_SERVER = {"server": SERVER.server, "distrust": [{"version": 2, "until_serial": 3}]}

# A run at step 4 with a checkpoint of step 2; one row was given up, one failed and waits to be issued again.
GROUP = {"bytes": 300, "tokens": 6, "servers": '["vllm-0"]'}
ROWS: dict[str, dict[str, Any]] = {
    "0.0": {"state": "forgotten", "step": 1, "trained_version": 1, **GROUP},
    "1.0": {"state": "forgotten", "step": 2, "trained_version": 2, **GROUP},
    "2.0": {"state": "reissued", "reason": "expired", "failures": 1},
    "2.1": {"state": "trained", "failures": 1, "step": 3, "trained_version": 3, "oldest_version": 2, **GROUP},
    "3.0": {"state": "trained", "step": 4, "trained_version": 4, "oldest_version": 3, **GROUP},
    "4.0": {"state": "ready", "arrival_version": 4, "oldest_version": 3, "newest_version": 4, **GROUP},
    "5.0": {"state": "leased", "lease_id": "l", "arrival_version": 4, "oldest_version": 4, **GROUP},
    "6.0": {"state": "issued"},
    "7.0": {"state": "dropped", "reason": "failed:judge", "failures": 3},
    "8.0": {"state": "reissued", "reason": "failed:judge", "failures": 1},
}
HOLD_PAYLOADS = ("2.1", "3.0", "4.0", "5.0")


def old_payload(ticket_id: str) -> bytes:
    """A group in message schema 1: spans without a server."""
    message = msgspec.msgpack.decode(codec.encode(group(ticket_id)))
    message["schema_version"] = 1
    for rollout in message["rollouts"]:
        for segment in rollout["segments"]:
            segment["version_spans"] = [span[:3] for span in segment["version_spans"]]
    return msgspec.msgpack.encode(message)


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(f"BEGIN; {LAYOUT_1} COMMIT;")
        columns = [row[1] for row in db.execute("PRAGMA table_info(tickets)")]
        for serial, (ticket_id, row) in enumerate(ROWS.items()):
            index, attempt = ticket_id.split(".")
            values: dict[str, Any] = {
                "bytes": 0,
                "tokens": 0,
                "oldest_version": 0,
                "newest_version": 0,
                "arrival_version": 0,
            }
            values |= {"failures": 0, "servers": "[]", "worker_id": "w", "version": 3, **row}
            values |= {"id": ticket_id, "index": int(index), "attempt": int(attempt), "serial": serial}
            marks = ", ".join("?" * len(columns))
            db.execute(f"INSERT INTO tickets VALUES ({marks})", [values.get(column) for column in columns])
        for ticket_id in HOLD_PAYLOADS:
            db.execute("INSERT INTO payloads VALUES (?, ?)", (ticket_id, old_payload(ticket_id)))
        db.execute("INSERT INTO run VALUES (1, ?)", (msgspec.json.encode(RUN),))
        db.execute("INSERT INTO servers VALUES (?, ?)", ("vllm-0", msgspec.json.encode(OLD_SERVER)))
    return path


@pytest.fixture
def migrated(old_file: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(old_file)
    yield store
    store.close()


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return [f"layout {layout_of(db)}", *db.iterdump()]


def test_the_learner_cannot_decode_what_layout_1_holds() -> None:
    with pytest.raises(codec.DecodeError):
        codec.decode(old_payload("4.0"), Group)


def test_i1_the_sums_agree_after_a_migration(migrated: SqliteStore) -> None:
    contents = migrated.load()
    ledger = Ledger(config(), contents, 0.0)
    counts = ledger.summary()
    assert (counts.issued, counts.trained, counts.dropped, counts.reissued, counts.outstanding) == (10, 4, 1, 4, 1)
    assert counts.issued == counts.trained + counts.dropped + counts.reissued + counts.outstanding
    assert [record.id for state in LIVE for record in ledger.tickets(state)] == ["6.0"]
    assert ledger.bytes == 0
    assert ledger.drops == {"failed:judge": 1}
    assert (contents.run, contents.servers, contents.next_index, contents.tokens_sampled) == (RUN, [SERVER], 9, 36)


def test_groups_that_waited_for_the_learner_are_issued_again(migrated: SqliteStore) -> None:
    records = migrated.records(list(ROWS))
    assert {i: (r.state, r.reason) for i, r in records.items() if r.state is TicketState.REISSUED} == {
        "2.0": (TicketState.REISSUED, "expired"),
        "4.0": (TicketState.REISSUED, reasons.OLD_LAYOUT),
        "5.0": (TicketState.REISSUED, reasons.OLD_LAYOUT),
        "8.0": (TicketState.REISSUED, "failed:judge"),
    }
    assert records["5.0"].lease_id is None
    assert {record.kind for record in records.values()} == {"train"}
    assert migrated.payloads(list(ROWS)) == {}
    ledger = Ledger(config(), migrated.load(), 0.0)
    issued = tickets.issue(ledger, "w", 4).tickets
    assert [record.id for record in issued] == ["4.1", "5.1", "8.1", "9.0"]
    assert [record.failures for record in issued] == [0, 0, 1, 0], "the migration is not a failure of the row"


def test_i1_a_resume_after_the_migration_issues_again_what_the_checkpoint_lacks(migrated: SqliteStore) -> None:
    ledger = Ledger(config(), migrated.load(), 0.0)
    begin = BeginSession(RUN.checkpoint_step or 0, 2, 9, resume=True)
    decision = leases.begin(ledger, begin, migrated.forgotten_after(begin.step))
    migrated.commit(decision, {})
    ledger.apply(decision, 0.0)
    assert sorted(ledger.to_reissue) == [2, 3, 4, 5, 8]
    assert ledger.run.version == 5
    counts = ledger.summary()
    assert (counts.issued, counts.trained, counts.dropped, counts.reissued, counts.outstanding) == (10, 2, 1, 6, 1)
    fresh = Ledger(config(), migrated.load(), 0.0)
    assert (fresh.summary(), fresh.to_reissue, fresh.run) == (counts, ledger.to_reissue, ledger.run)


async def test_a_queue_on_a_migrated_file_goes_on_with_its_run(old_file: Path) -> None:
    run = config(vllm={"servers": ["http://s:1"]})
    async with serving(run, SqliteStore(old_file)) as queue, QueueClient(queue.url, patience_s=5.0) as client:
        position = await client.position()
        assert (position.version, position.step, position.session, position.served_version) == (4, 4, 2, 4)
        given = (await client.tickets(TicketRequest("w", 8, wait_s=0.0))).tickets
        assert [ticket.id for ticket in given] == ["4.1", "5.1", "8.1"]
        await client.submit(group(given[0]))
        reply = await client.lease(LeaseRequest(2, "l", 8, wait_s=0.0))
        assert codec.decode(bytes(reply.groups[0]), Group).ticket_id == "4.1"
        counts = (await client.status()).ledger
        assert counts.issued == counts.trained + counts.dropped + counts.reissued + counts.outstanding == 13


def test_a_learner_that_goes_on_cannot_train_what_was_let_go(migrated: SqliteStore) -> None:
    ledger = Ledger(config(), migrated.load(), 0.0)
    with pytest.raises(Refusal) as refusal:
        leases.ack(ledger, ServerRegistry(), LeaseAck(2, ["5.0"], step=5, version=5), migrated.records(["5.0"]))
    assert refusal.value.reason == reasons.NOT_LEASED


def test_a_migrated_file_has_the_layout_of_a_new_one(old_file: Path, tmp_path: Path) -> None:
    SqliteStore(old_file).close()
    new_file = tmp_path / "new" / FILE_NAME
    SqliteStore(new_file).close()
    with closing(sqlite3.connect(old_file)) as old, closing(sqlite3.connect(new_file)) as new:
        assert layout_of(old) == layout_of(new) == LAYOUT == len(MIGRATIONS)
        assert schema(old) == schema(new)


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


def test_a_migration_that_is_killed_leaves_the_old_layout_whole(old_file: Path) -> None:
    for layout in range(1, LAYOUT):
        before = dump(old_file)
        assert before[0] == f"layout {layout}"
        statements = 1 + len(("BEGIN", *MIGRATIONS[layout].statements, "user_version", "COMMIT"))
        for at in range(2, statements + 1):
            assert migrate_and_die(old_file, at) == -signal.SIGKILL
            assert dump(old_file) == before, f"killed at statement {at}"
        # As it begins the step after this one, of which the newest has none.
        assert migrate_and_die(old_file, statements + 1) == (0 if layout + 1 == LAYOUT else -signal.SIGKILL)
    store = SqliteStore(old_file)
    assert store.load().counts[TicketState.REISSUED] == 4
    store.close()


def test_a_new_file_whose_making_was_killed_is_made_when_it_is_opened_again(tmp_path: Path) -> None:
    """Between its steps a new file is an empty one of an older layout."""
    for at in (4, 9, 10, 13, 16, 20):
        path = tmp_path / f"{at}.db"
        assert migrate_and_die(path, at) == -signal.SIGKILL
        store = SqliteStore(path)
        store.commit(Decision((TicketRecord(index=0, attempt=0, serial=0, worker_id="w", version=0),)), {})
        store.close()


def test_hole_4_a_migrated_group_keeps_its_versions_for_each_server(old_file: Path) -> None:
    """Layout 2 knew the versions of the group alone: any of its servers may have sampled any of them."""
    with closing(sqlite3.connect(old_file, isolation_level=None)) as db:
        db.execute("""UPDATE tickets SET servers = '["a", "b"]' WHERE id = '4.0'""")
    store = SqliteStore(old_file)
    facts = store.records(["4.0", "6.0"])
    assert facts["4.0"].group.servers == (SampledBy("a", 3, 4), SampledBy("b", 3, 4))
    assert facts["6.0"].group.servers == ()
    store.close()


def test_a_user_is_told_what_a_migration_did(old_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    SqliteStore(old_file).close()
    assert "migrated to layout 2" in caplog.text
    assert "rows issued again" in caplog.text
    caplog.clear()
    SqliteStore(old_file).close()
    SqliteStore(MEMORY).close()
    assert caplog.text == ""


def test_a_file_of_a_newer_release_is_refused_with_the_remedy_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    before = dump(path)
    for read in (
        SqliteStore,
        lambda path: SqliteReader(path).read_ledger(),
        lambda path: SqliteReader(path).run_state(),
    ):
        with pytest.raises(ConfigError, match=rf"queue\.db.*layout {LAYOUT + 1}.*upgrade, or move it away"):
            read(path)
    assert dump(path) == before


def test_one_run_directory_has_one_queue(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match="in use by another queue"):
        SqliteStore(tmp_path / FILE_NAME)
    first.close()
    SqliteStore(tmp_path / FILE_NAME).close()


def test_bad_input_a_file_that_is_not_a_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"this is no database, but long enough to look like a file")
    with pytest.raises(ConfigError, match=r"queue\.db.*move it away"):
        SqliteStore(path)
    with pytest.raises(ConfigError, match=r"queue\.db.*cannot be read as a run's ledger"):
        SqliteReader(path).read_ledger()
    path.unlink()
    SqliteStore(path).close()


def test_a_store_that_another_program_writes_to_is_not_called_broken(
    old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Move it away" would lose the ledger; and the queue may be started again."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0.1))  # sqlite waits 5 s for the lock
    other = sqlite3.connect(old_file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StoreError, match="cannot be opened now: database is locked; end what else has it open"):
            SqliteStore(old_file)
    finally:
        other.close()
    SqliteStore(old_file).close()


def test_the_ledger_can_be_read_beside_a_running_queue(tmp_path: Path) -> None:
    path = tmp_path / "50% #1?" / FILE_NAME
    store = SqliteStore(path)
    store.commit(Decision((TicketRecord(index=4, attempt=1, serial=0, worker_id="w", version=0),)), {})
    assert SqliteReader(path).read_ledger() == [LedgerRow("4.1", 4, TicketState.ISSUED, None, None, None)]
    store.close()


def test_the_ledger_of_an_old_file_can_be_read_and_stays_as_it_is(old_file: Path) -> None:
    before = dump(old_file)
    rows = SqliteReader(old_file).read_ledger()
    assert [row.ticket_id for row in rows] == list(ROWS)
    assert rows[3] == LedgerRow("2.1", 2, TicketState.TRAINED, None, 3, 3)
    assert [row.ticket_id for row in rows if row.trained] == ["0.0", "1.0", "2.1", "3.0"]
    assert dump(old_file) == before


def test_slipstream_ledger_says_trained_whether_or_not_the_payload_was_let_go(old_file: Path) -> None:
    rows = {row.ticket_id: (row.state, row.step) for row in SqliteReader(old_file).read_ledger()}
    assert (rows["1.0"], rows["2.1"]) == ((TicketState.TRAINED, 2), (TicketState.TRAINED, 3))


def test_slipstream_ledger_prints_every_ticket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(run={"dir": str(tmp_path), "name": "audit"})
    with pytest.raises(ConfigError, match=r"there is no ledger"):
        print_ledger(run)
    store = SqliteStore(run.run_dir / FILE_NAME)
    store.commit(Decision((TicketRecord(index=4, attempt=1, serial=0, worker_id="w", version=0),)), {})
    store.close()
    print_ledger(run)
    assert [json.loads(line)["ticket_id"] for line in capsys.readouterr().out.splitlines()] == ["4.1"]
    with pytest.raises(ConfigError, match=r'queue.store = ":memory:" keeps no ledger'):
        print_ledger(config(run={"dir": str(tmp_path), "name": "audit"}, queue={"store": MEMORY}))
