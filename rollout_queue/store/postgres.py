"""Stores everything in PostgreSQL: several queues on one database, of which one is active and the others stand by.

Whoever holds the advisory lock of the run's schema is active. The lock is the connection's: it is free as soon as
PostgreSQL knows that the process is gone. An owner that is stopped keeps its connection, so one that has committed
nothing for `MAX_SILENCE_S`, by the clock of PostgreSQL, is disconnected. Its commits fail from then on, by the epoch.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import psycopg

from slipstream.rollout_queue.ledger.records import StoreContents
from slipstream.rollout_queue.store.base import MAX_SILENCE_S, StoreError, StoreSize, Superseded
from slipstream.rollout_queue.store.changes import Changes
from slipstream.rollout_queue.store.postgres_database import (
    HOLDER,
    Connection,
    Database,
    adapted,
    has_schema,
    one_line,
    try_lock,
    unlock,
)
from slipstream.rollout_queue.store.sql import TABLES, UNREADABLE, Query, Row, SqlStore, Write, insert, writes

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds for which a connection is sought, at the start and after it was lost, before the queue ends, and the pauses
# between the tries.
MAX_LOST_S = 60.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 0.5

# Errors that pass: the connection, its server, or the server's resources are gone for a while; or the server can only
# be read, as one that is not the primary any more.
_PASSING = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01", "25006")

# Rows that are in memory at a time while a store is filled.
_ROWS = 64

_COMMIT = b"UPDATE owner SET commit_id = %s, seen_at = clock_timestamp(), held = (epoch = %s)"
_SEEN = b"UPDATE owner SET seen_at = clock_timestamp() WHERE epoch = %s"
_BECOME = b"UPDATE owner SET epoch = epoch + 1, url = %s, seen_at = clock_timestamp() RETURNING epoch"
_OWNER = b"SELECT url, COALESCE(EXTRACT(EPOCH FROM clock_timestamp() - seen_at), 0)::float8 FROM owner"
_SIZE = b"""SELECT COALESCE(SUM(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
    WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"""


class _StillHeld(psycopg.OperationalError):
    """The lock is still held by the connection that was lost."""


class PostgresStore(SqlStore):
    """A `Store` in its own schema. Make all calls from one thread at a time."""

    has_standbys = True

    def __init__(self, database: Database, url: str) -> None:
        """Connect. While PostgreSQL is away it is waited for, as later.

        Args:
            url: Of this queue, for those that stand by.

        Raises:
            ConfigError: The database cannot be used.
            StoreError: It could not be reached for `MAX_LOST_S`.
        """
        self._database = database
        self._url = url
        self._epoch: int | None = None
        self._db: Connection | None = None
        self._given_up = threading.Event()
        # Backend of the connection that holds, or held, the lock.
        self._backend = 0
        self._connect = database.open
        self._ride_out(lambda _: None)
        self._connect = self._reconnect

    def acquire(self) -> str | None:
        return self._ride_out(self._acquire)

    def load(self) -> StoreContents:
        self._ride_out(lambda db: db.execute(_SEEN, (self._epoch,)))
        return super().load()

    def commit(self, changes: Changes) -> None:
        if self._epoch is None:
            raise AssertionError("a store is acquired before the first commit")
        self._ride_out(partial(self._commit, uuid4().hex, list(writes(changes)), []))

    def size(self) -> StoreSize:
        ((found,),) = self._ride_out(lambda db: db.execute(_SIZE).fetchall())
        return StoreSize(found)

    def fill(self, rows_of: Callable[[str], Iterator[Row]]) -> dict[str, int]:
        """Put every row of another store into this one, which has none. Return the number of rows of each table.

        Args:
            rows_of: Returns the rows of one of `sql.TABLES`.
        """

        def copy(db: Connection) -> dict[str, int]:
            with db.transaction(), db.cursor() as cursor:
                done = {}
                for table in TABLES:
                    rows, done[table] = rows_of(table), 0
                    while some := list(islice(rows, _ROWS)):
                        cursor.executemany(adapted(insert(table)), some)
                        done[table] += len(some)
                return done

        return self._ride_out(copy)

    def commit_at_once(self, changes: Changes) -> bool:
        return False

    def give_up(self) -> None:
        self._given_up.set()
        if (db := self._db) is not None:
            # A server that hangs would be waited for without end.
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(db.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._db is not None:
            unlock(self._db)
            self._db.close()

    def _acquire(self, db: Connection) -> str | None:
        schema = self._database.schema
        if not try_lock(db, schema):
            url, silent_s = "", 0.0
            if has_schema(db):
                ((url, silent_s),) = db.execute(_OWNER)
            if silent_s < MAX_SILENCE_S:
                return url or "an unknown address"
            logger.warning("the queue at %s has been silent for %.1f s: taking over from it", url, silent_s)
            db.execute(b"SELECT pg_terminate_backend(pid, 2000) FROM (" + HOLDER + b") AS holder", (schema,))
            if not try_lock(db, schema):
                return url or "an unknown address"
        self._database.migrate(db)
        ((self._epoch,),) = db.execute(_BECOME, (self._url,))
        self._backend = db.info.backend_pid
        return None

    def _commit(self, commit_id: str, todo: list[Write], tried: list[bool], db: Connection) -> None:
        """Write a commit, unless an earlier try of it took effect after all."""
        if tried:
            ((last,),) = db.execute(b"SELECT commit_id FROM owner")
            if last == commit_id:
                return
        tried.append(True)
        try:
            with db.pipeline(), db.cursor() as cursor:  # one round trip
                cursor.execute(b"BEGIN")
                cursor.execute(_COMMIT, (commit_id, self._epoch))
                for write in todo:
                    if len(write.rows) == 1:
                        cursor.execute(adapted(write.statement), write.rows[0])
                    else:
                        cursor.executemany(adapted(write.statement), write.rows)
                cursor.execute(b"COMMIT")
        except psycopg.errors.CheckViolation as error:
            if error.diag.table_name != "owner":
                raise
            self._give_up()
        finally:
            if not db.closed:
                db.rollback()  # nothing after a commit

    def _read(self, of: Callable[[Query], T]) -> T:
        def query(db: Connection, statement: str, parameters: Any) -> list[tuple[Any, ...]]:
            return db.execute(adapted(statement), parameters, binary=True).fetchall()

        try:
            return self._ride_out(lambda db: of(partial(query, db)))
        except UNREADABLE as error:
            raise StoreError(
                f"the queue's store {self._database.name} is damaged: {error}; restore it from a backup, then start "
                f"the queue again"
            ) from error

    def _ride_out(self, work: Callable[[Connection], T]) -> T:
        """Call `work`, again after each loss of the connection; it must be harmless to repeat.

        Raises:
            StoreError: The connection could not be had for `MAX_LOST_S`, or something else failed.
        """
        until, pause_s = 0.0, _FIRST_PAUSE_S
        while True:
            try:
                if self._db is None:
                    self._db = self._connect()
                found = work(self._db)
                if until:
                    logger.warning("%s: connected", self._database.name)
                return found
            except psycopg.Error as error:
                if self._db is not None and not _passes(self._db, error):
                    raise StoreError(
                        f"the queue's store {self._database.name} failed: {one_line(error)}; mend the database, then "
                        f"start the queue again"
                    ) from error
                self._drop()
                if self._given_up.is_set():
                    raise StoreError(
                        f"the queue's store {self._database.name} did not answer when the queue was to end: what was "
                        f"under way may not be stored, and nobody was told that it is"
                    ) from error
                now = time.monotonic()
                if not until:
                    until = now + MAX_LOST_S
                    logger.warning(
                        "%s: no connection, trying again for up to %g s: %s",
                        self._database.name,
                        MAX_LOST_S,
                        one_line(error),
                    )
                if now >= until:
                    raise StoreError(
                        f"the queue's store {self._database.name} could not be reached for {MAX_LOST_S:g} s: "
                        f"{one_line(error)}; start PostgreSQL, then start the queue again"
                    ) from error
                self._given_up.wait(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _reconnect(self) -> Connection:
        """Connect, and take the lock again if this queue was the active one.

        Raises:
            Superseded: Another queue is active now, or was meanwhile.
            psycopg.Error: It cannot be done now.
        """
        db = self._database.connect()
        try:
            if self._epoch is None:
                return db
            schema = self._database.schema
            locked = try_lock(db, schema)
            ((epoch,),) = db.execute(b"SELECT epoch FROM owner")
            if epoch != self._epoch:
                self._give_up()
            if not locked:
                # PostgreSQL may not have noticed yet that the old connection is gone. Whatever was sent on it has to be
                # over before anyone asks whether it took effect.
                db.execute(
                    b"SELECT pg_terminate_backend(pid, 2000) FROM (" + HOLDER + b") AS holder WHERE pid = %s",
                    (schema, self._backend),
                )
                raise _StillHeld("the lock of the lost connection is still held")
            self._backend = db.info.backend_pid
        except BaseException:
            db.close()
            raise
        return db

    def _drop(self) -> None:
        if self._db is not None:
            with suppress(psycopg.Error):
                self._db.close()
            self._db = None

    def _give_up(self) -> NoReturn:
        raise Superseded(
            f"another queue has become the active one on {self._database.name}: this one has stored nothing more, and "
            f"stands by from now on"
        )


def _passes(db: Connection, error: psycopg.Error) -> bool:
    """Tell whether another try, on another connection, may succeed."""
    if error.sqlstate is None:
        return db.closed or isinstance(error, psycopg.OperationalError)
    return db.closed or error.sqlstate.startswith(_PASSING)
