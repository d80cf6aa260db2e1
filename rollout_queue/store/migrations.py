"""The layouts of the SQLite store, oldest first: a file of any of them is brought to the newest when it is opened.

`PRAGMA user_version` holds a file's layout, 0 when it is new. A new file takes every step, so that there is one way to
the newest layout. Each step is one transaction: killed in the middle, it leaves the layout before it whole.
"""

from __future__ import annotations

import logging
import sqlite3

import msgspec

from protocol import reasons

logger = logging.getLogger(__name__)


class Migration(msgspec.Struct, frozen=True):
    """One step; `effect` tells a user what happened to the data of a file that was in use."""

    effect: str
    statements: tuple[str, ...]


# MIGRATIONS[n] leads from layout n to n + 1. Once released, a step never changes: append.
MIGRATIONS = (
    Migration(
        "a new file",
        (
            """CREATE TABLE tickets (
                id TEXT PRIMARY KEY, "index" INT, attempt INT, serial INT, worker_id TEXT, version INT, state TEXT,
                failures INT, reason TEXT, lease_id TEXT, bytes INT, tokens INT, oldest_version INT, newest_version INT,
                arrival_version INT, servers TEXT, step INT, trained_version INT, UNIQUE ("index", attempt)
            ) WITHOUT ROWID""",
            "CREATE INDEX tickets_by_state ON tickets (state, step)",
            "CREATE TABLE payloads (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
            "CREATE TABLE servers (name TEXT PRIMARY KEY, record BLOB NOT NULL)",
            "CREATE TABLE run (one INTEGER PRIMARY KEY CHECK (one = 1), record BLOB NOT NULL)",
        ),
    ),
    # Payloads are in message schema 1 here, which nothing decodes any more. Rows of trained groups are issued again
    # only if a learner resumes from before their step, as those of forgotten ones always are.
    Migration(
        "tickets have a kind; the groups in it are in an old format: they are let go and their rows issued again",
        (
            "ALTER TABLE tickets ADD COLUMN kind TEXT NOT NULL DEFAULT 'train'",
            f"""UPDATE tickets SET state = 'reissued', reason = '{reasons.OLD_LAYOUT}', lease_id = NULL
                WHERE state IN ('ready', 'leased')""",
            "UPDATE tickets SET state = 'forgotten' WHERE state = 'trained'",
            "DELETE FROM payloads",
        ),
    ),
    # What each server of a group sampled was not kept: any of the group's versions, to be safe. Neither was which of
    # the servers ever served: all of them, as groups that are under way would be refused otherwise.
    Migration(
        "tickets keep the versions of each server, and old ones are kept as sums",
        (
            """UPDATE tickets SET servers = (
                SELECT json_group_array(json_array(value, oldest_version, newest_version)) FROM json_each(servers)
            )""",
            "ALTER TABLE tickets DROP COLUMN newest_version",
            "UPDATE servers SET record = json_set(CAST(record AS TEXT), '$.served', json('true'))",
            """CREATE TABLE sums (
                state TEXT, reason TEXT, tickets INT, tokens INT, PRIMARY KEY (state, reason)
            ) WITHOUT ROWID""",
        ),
    ),
    Migration(
        "evaluations are kept",
        (
            "CREATE TABLE evaluations (number INTEGER PRIMARY KEY, record BLOB NOT NULL)",
            """CREATE TABLE evaluation_rows (
                evaluation INT, "row" INT, record BLOB NOT NULL, PRIMARY KEY (evaluation, "row")
            ) WITHOUT ROWID""",
        ),
    ),
    # Of a server that has joined again, the version that it had before was not kept: all of the run's, to be safe for
    # the groups that are under way.
    Migration(
        "servers keep the newest version that was proven on them",
        (
            """UPDATE servers SET record = json_set(CAST(record AS TEXT), '$.proven', COALESCE(
                json_extract(CAST(record AS TEXT), '$.server.version'),
                (SELECT json_extract(CAST(record AS TEXT), '$.version') FROM run), 0
            )) WHERE json_extract(CAST(record AS TEXT), '$.served')""",
        ),
    ),
)
LAYOUT = len(MIGRATIONS)


def layout_of(db: sqlite3.Connection) -> int:
    """The layout of an open file, 0 if it is new."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection, name: str) -> None:
    """Bring a file to the newest layout; `name` is for the log. `db` is in autocommit mode; raises `sqlite3.Error`."""
    before = layout_of(db)
    for layout, migration in enumerate(MIGRATIONS[before:], before + 1):
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
