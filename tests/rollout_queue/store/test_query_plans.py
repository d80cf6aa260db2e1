"""No statement of a running queue walks through a table: what it costs does not grow with the run."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from slipstream.protocol.config import QueueSection
from slipstream.rollout_queue.ledger.records import TicketRecord
from slipstream.rollout_queue.store import migrations, sql
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.postgres import PostgresStore
from slipstream.rollout_queue.store.postgres_database import Database, adapted
from tests.kit.postgres import cluster
from tests.kit.stores import in_every_table

# Changes of every kind.
EVERYTHING = msgspec.structs.replace(
    in_every_table(2, pruned_below=1), let_go=frozenset({"1.0"}), ended=frozenset({1}), forgotten=frozenset({1})
)


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrations.migrate(db, "queue.db")
        yield db


def test_no_statement_of_a_commit_or_a_lease_scans_a_table(db: sqlite3.Connection) -> None:
    statements = [(write.statement, write.rows[0]) for write in sql.writes(EVERYTHING)]
    assert len(statements) == 12, "a change of every kind"

    def seen(statement: str, parameters: tuple[object, ...]) -> list[sql.Row]:
        statements.append((statement, parameters))
        return db.execute(statement, parameters).fetchall()

    class Reading(sql.SqlStore):
        def _read(self, of):  # type: ignore[no-untyped-def]
            return of(seen)

    store = Reading()
    store.records(["0.0", "1.0"])
    store.payloads(["0.0"])
    store.forgotten_after(3)
    store.first_forgotten_after(3)
    for statement, parameters in statements:
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
        assert not [step for step in plan if step.startswith("SCAN")], (statement, plan)
        db.execute(statement, parameters)


def test_postgresql_scans_no_table_either_however_little_it_knows_of_them() -> None:
    """Right after a start there are no statistics, and prepared statements are planned without their parameters."""
    database = Database(QueueSection(store=cluster().new_database()), "run")
    with closing(PostgresStore(database, "")) as store, closing(database.connect()) as db:
        assert store.acquire() is None
        db.execute(b"SET plan_cache_mode = force_generic_plan")
        store.commit(Changes(tickets={f"{index}.0": TicketRecord(index, 0, index, "w", 0) for index in range(2000)}))
        for write in sql.writes(EVERYTHING):
            found = db.execute(b"EXPLAIN " + adapted(write.statement), write.rows[0]).fetchall()
            plan = "\n".join(line for (line,) in found)
            assert "Seq Scan" not in plan, plan


def test_changes_of_nothing_run_no_statement() -> None:
    assert list(sql.writes(Changes())) == []
