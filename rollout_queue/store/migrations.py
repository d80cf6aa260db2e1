"""The layouts of the SQLite store, oldest first. Opening a file brings it to the newest one.

`PRAGMA user_version` holds a file's layout, 0 in a new file. A new file takes every step, so there is one way to the
newest layout. Each step is one transaction: a process killed in the middle leaves the layout before it whole.
"""

from __future__ import annotations

import logging
import sqlite3

import msgspec

logger = logging.getLogger(__name__)

# The layout that the first migration makes. Layouts 1 to 4 were before the first release; their files are refused.
FIRST_LAYOUT = 5


class Migration(msgspec.Struct, frozen=True):
    """One step; `effect` tells a user what happened to the data of a file that was in use."""

    effect: str
    statements: tuple[str, ...]


# MIGRATIONS[n] makes layout FIRST_LAYOUT + n from the one before. Once released, a step never changes: append.
MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        "a new file",
        (
            """CREATE TABLE tickets (
                id TEXT PRIMARY KEY, "index" INT, attempt INT, serial INT, worker_id TEXT, version INT, state TEXT,
                failures INT, reason TEXT, lease_id TEXT, bytes INT, tokens INT, oldest_version INT,
                arrival_version INT, servers TEXT, step INT, trained_version INT, kind TEXT NOT NULL DEFAULT 'train',
                UNIQUE ("index", attempt)
            ) WITHOUT ROWID""",
            "CREATE INDEX tickets_by_state ON tickets (state, step)",
            "CREATE TABLE payloads (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
            "CREATE TABLE servers (name TEXT PRIMARY KEY, record BLOB NOT NULL)",
            "CREATE TABLE run (one INTEGER PRIMARY KEY CHECK (one = 1), record BLOB NOT NULL)",
            # Tickets of old rows, which are kept as sums alone.
            """CREATE TABLE sums (
                state TEXT, reason TEXT, tickets INT, tokens INT, PRIMARY KEY (state, reason)
            ) WITHOUT ROWID""",
            "CREATE TABLE evaluations (number INTEGER PRIMARY KEY, record BLOB NOT NULL)",
            """CREATE TABLE evaluation_rows (
                evaluation INT, "row" INT, record BLOB NOT NULL, PRIMARY KEY (evaluation, "row")
            ) WITHOUT ROWID""",
        ),
    ),
    Migration(
        "tickets of open evaluations are kept as those of the training are",
        (
            "ALTER TABLE tickets DROP COLUMN kind",
            "ALTER TABLE evaluation_rows RENAME TO evaluation_tickets",
            """UPDATE evaluation_tickets SET record = (SELECT CAST(json_object(
                'index', old ->> 'index', 'attempt', old ->> 'attempt', 'serial', old ->> 'serial',
                'worker_id', old ->> 'worker_id', 'version', old ->> 'version', 'failures', old ->> 'failures',
                'reason', old ->> 'reason', 'evaluation', old ->> 'evaluation',
                'state', CASE old ->> 'state'
                    WHEN 'again' THEN 'reissued' WHEN 'done' THEN 'evaluated' WHEN 'failed' THEN 'dropped'
                    ELSE 'issued' END,
                'result', old -> 'result',
                'group', json_object('bytes', 1, 'servers', json(COALESCE(old -> '$.result.servers', '[]')))
            ) AS BLOB) FROM (SELECT CAST(record AS TEXT) AS old))""",
        ),
    ),
    Migration(
        "a checksum is kept of each group that comes from now on",
        ("ALTER TABLE payloads ADD COLUMN checksum INT",),
    ),
    Migration(
        "each commit checks that no other queue has become the active one",
        (
            "CREATE TABLE owner (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INT, seen_at REAL)",
            "INSERT INTO owner VALUES (1, 0, NULL)",
        ),
    ),
    Migration(
        "a change of a ticket's state touches no index",
        (
            "DROP INDEX tickets_by_state",
            """CREATE INDEX tickets_forgotten ON tickets (step, "index") WHERE state = 'forgotten'""",
        ),
    ),
    Migration("the bodies of groups lie in a folder next to it", ()),
    Migration(
        'rows may be chosen by how they went (task.order = "learnable")',
        (
            'ALTER TABLE tickets ADD COLUMN "row" INT',
            'CREATE TABLE row_estimates ("row" INTEGER PRIMARY KEY, tried INT, mean REAL, spread REAL)',
        ),
    ),
)


def newest_layout() -> int:
    return FIRST_LAYOUT + len(MIGRATIONS) - 1


def layout_of(db: sqlite3.Connection) -> int:
    """Return the layout of an open file, 0 if it is new."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection, name: str) -> None:
    """Bring a file to the newest layout.

    Args:
        db: The open file, in autocommit mode; new, or of FIRST_LAYOUT or later.
        name: Names the file in the log.

    Raises:
        sqlite3.Error: The file cannot be read or written.
    """
    before = layout_of(db)
    done = before - FIRST_LAYOUT + 1 if before else 0
    for layout, migration in enumerate(MIGRATIONS[done:], FIRST_LAYOUT + done):
        try:
            db.execute("BEGIN IMMEDIATE")
            for statement in migration.statements:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {layout}")
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.rollback()
        if before > 0:
            logger.warning("%s: migrated to layout %d: %s", name, layout, migration.effect)
