"""Copies whole stores: a backup next to a running queue, and the move of a standing run to PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.rollout_queue.ledger.records import StoreContents
from slipstream.rollout_queue.store.base import StoreReader
from slipstream.rollout_queue.store.sql import TABLES, Row, quoted
from slipstream.rollout_queue.store.sqlite import SqliteStore
from slipstream.rollout_queue.store.sqlite_file import FILE_NAME, check_sound, count_rows


def back_up(store: StoreReader, path: Path) -> dict[str, int]:
    """Write one state of a store, which a queue may be using, into a new SQLite file, and check that.

    Returns:
        The number of rows of each table.

    Raises:
        ConfigError: The store cannot be read, or the file is there already or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} is there already: choose another file, or move it away")
    unfinished = path.with_name(f".unfinished-{path.name}")
    try:
        unfinished.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(unfinished, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = FULL")
            rows = store.copy_into(db)
            db.execute("PRAGMA journal_mode = DELETE")
            check_sound(db, unfinished)
            found = count_rows(db)
        if {table: found.get(table) for table in rows} != rows:
            raise ConfigError(f"{path}: the copy has not the rows of the store: {found}, not {rows}; try again")
        os.link(unfinished, path)  # unlike a rename, it never replaces a file
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{path}: cannot be written: {error}; choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return rows


def move_to_postgres(config: RunConfig, target: RunConfig) -> dict[str, int]:
    """Copy the SQLite store of a run, on which no queue runs, into a PostgreSQL database. The file stays.

    Args:
        target: The run file with the database as its store.

    Returns:
        The number of rows of each table.

    Raises:
        ConfigError: One of the two cannot be used, or the database holds the run already.
    """
    from slipstream.rollout_queue.store.postgres_database import Database

    database = Database(target.queue, target.run.name)  # its module says what to install
    from slipstream.rollout_queue.store.postgres import PostgresStore

    path = config.run_dir / FILE_NAME
    if config.queue.store_kind != "sqlite":
        raise ConfigError(
            f"queue.store = {config.queue.store}: a run is copied out of its SQLite store alone: if that is what you "
            f"want, give --queue.store sqlite"
        )
    if not path.exists():
        raise ConfigError(f"queue.store = {config.queue.store}: there is no {path} to copy from")
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.closing(SqliteStore(path)))
        held.acquire()
        source = stack.enter_context(contextlib.closing(sqlite3.connect(path)))
        into = PostgresStore(database, target.queue.own_address)
        stack.enter_context(contextlib.closing(into))
        if (active := into.acquire()) is not None:
            raise ConfigError(f"{target.queue.store}: the queue at {active} uses the run's schema: stop it first")
        if into.load() != StoreContents():
            raise ConfigError(
                f"{target.queue.store}: it holds a run {target.run.name} already: choose another run.name, or another "
                f"database"
            )

        def rows_of(table: str) -> Iterator[Row]:
            if table == "payloads":
                return held.bodies()
            return source.execute(f"SELECT {quoted(TABLES[table][0])} FROM {table}")

        rows = into.fill(rows_of)
        found = {**count_rows(source), "payloads": sum(1 for _ in held.bodies())}
    if {table: found[table] for table in rows} != rows:
        raise ConfigError(f"{target.queue.store}: not every row arrived: {rows}, not {found}; try another database")
    return rows
