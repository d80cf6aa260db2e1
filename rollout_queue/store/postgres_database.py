"""A PostgreSQL database as a store sees it: one schema for each run, its layouts, and how to connect."""

from __future__ import annotations

import hashlib
import logging
import re
from contextlib import suppress
from functools import cache
from typing import Any

from slipstream.protocol.config import ConfigError, QueueSection
from slipstream.rollout_queue.store.base import StoreError
from slipstream.rollout_queue.store.migrations import Migration

try:
    import psycopg
    from psycopg.types.numeric import Int8BinaryDumper
    from psycopg.types.string import StrDumperUnknown
except ImportError as error:
    raise ConfigError(
        "queue.store = postgresql://...: psycopg is not installed here: pip install 'slipstream-rl[postgres]'"
    ) from error

logger = logging.getLogger(__name__)

# It warns of each broken connection, which the store rides out and reports itself.
logging.getLogger("psycopg").setLevel(logging.ERROR)

Connection = psycopg.Connection[tuple[Any, ...]]

# Seconds until a connection is given up. Both ends notice the other's machine gone: the server then frees the lock.
_CONNECT_S = 5
_KEEPALIVES = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
_TCP_USER_TIMEOUT_MS = 10_000

# What a server answers, in words alone, to a connection that another try may be given.
_ANSWERS_THAT_PASS = re.compile(r"too many (clients|connections)|connection slots are reserved|read-only|hot standby")

# A name of PostgreSQL's has at most 63 bytes; a longer one would be cut without a word.
_MAX_NAME = 63

# A schema's layout stands in its table `layout`. LAYOUTS[n] makes layout n + 1. Once released, none changes: append.
LAYOUTS: tuple[Migration, ...] = (
    Migration(
        "a new schema",
        (
            "CREATE TABLE layout (number INT NOT NULL)",
            "INSERT INTO layout VALUES (0)",
            # A commit of a queue that another has taken over from sets `held` to false, and so fails as a whole.
            """CREATE TABLE owner (
                epoch BIGINT NOT NULL, commit_id TEXT, url TEXT, seen_at TIMESTAMPTZ, held BOOL CHECK (held)
            )""",
            "INSERT INTO owner VALUES (0, NULL, NULL, NULL, TRUE)",
            """CREATE TABLE tickets (
                id TEXT PRIMARY KEY, "index" BIGINT, attempt BIGINT, serial BIGINT, worker_id TEXT, version BIGINT,
                state TEXT, failures BIGINT, reason TEXT, lease_id TEXT, bytes BIGINT, tokens BIGINT,
                oldest_version BIGINT, arrival_version BIGINT, servers TEXT, step BIGINT, trained_version BIGINT,
                UNIQUE ("index", attempt)
            )""",
            "CREATE INDEX tickets_by_state ON tickets (state, step)",
            # A group is compressed already as far as it can be: its log-probs are noise.
            "CREATE TABLE payloads (id TEXT PRIMARY KEY, body BYTEA NOT NULL, checksum BIGINT)",
            "ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL",
            "CREATE TABLE servers (name TEXT PRIMARY KEY, record BYTEA NOT NULL)",
            "CREATE TABLE run (one INT PRIMARY KEY CHECK (one = 1), record BYTEA NOT NULL)",
            "CREATE TABLE sums (state TEXT, reason TEXT, tickets BIGINT, tokens BIGINT, PRIMARY KEY (state, reason))",
            "CREATE TABLE evaluations (number BIGINT PRIMARY KEY, record BYTEA NOT NULL)",
            """CREATE TABLE evaluation_tickets (
                evaluation BIGINT, "row" BIGINT, record BYTEA NOT NULL, PRIMARY KEY (evaluation, "row")
            )""",
        ),
    ),
    # Only the load and a resume, which read most of the table anyway, ever used it.
    Migration("a change of a ticket's state touches no index", ("DROP INDEX tickets_by_state",)),
    Migration(
        'rows may be chosen by how they went (task.order = "learnable")',
        (
            'ALTER TABLE tickets ADD COLUMN "row" BIGINT',
            """CREATE TABLE row_estimates (
                "row" BIGINT PRIMARY KEY, tried BIGINT, mean DOUBLE PRECISION, spread DOUBLE PRECISION
            )""",
        ),
    ),
)

# Backend of the connection that holds the lock of a schema. A lock of one number of 64 bits shows in two halves.
HOLDER = b"""SELECT pid FROM pg_locks, hashtextextended(%s, 0) AS key WHERE locktype = 'advisory' AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND classid::bigint = (key >> 32) & 4294967295 AND objid::bigint = key & 4294967295 AND objsubid = 1"""


class _Text(StrDumperUnknown):
    """Writes text without the character NUL, which PostgreSQL cannot hold, and SQLite can."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\N{SYMBOL FOR NULL}"))


class Database:
    """The database of `queue.store`, and the schema of a run in it.

    Args:
        queue: Names the database. Its password is in no text that this class makes.
        run: Name of the run.

    Attributes:
        run: As given.
        schema: The schema's name.
        name: Names database and schema to people.
    """

    def __init__(self, queue: QueueSection, run: str) -> None:
        self._url = queue.store
        self._password = queue.store_password
        self.run = run
        self.schema = schema_of(run)
        self.name = f"{self._url} (schema {self.schema})"

    def connect(self) -> Connection:
        """Open a connection on the schema, in autocommit mode. Raises `psycopg.Error`."""
        given: dict[str, Any] = {"connect_timeout": _CONNECT_S, "tcp_user_timeout": _TCP_USER_TIMEOUT_MS, **_KEEPALIVES}
        given |= {"password": self._password} if self._password else {}
        own = psycopg.conninfo.conninfo_to_dict(self._url)
        db = psycopg.connect(
            self._url,
            autocommit=True,
            prepare_threshold=0,
            application_name="slipstream",
            client_encoding="utf8",
            **{name: value for name, value in given.items() if name not in own},
        )
        try:
            db.adapters.register_dumper(str, _Text)
            # The types of its parameters are part of a prepared statement, and a small number is of another one.
            db.adapters.register_dumper(int, Int8BinaryDumper)
            settings = {"search_path": f'"{self.schema}"', "jit": "off", "tcp_user_timeout": _TCP_USER_TIMEOUT_MS}
            # Without statistics, as after a quick start, PostgreSQL takes "below a mark" for a third of the table.
            settings["enable_seqscan"] = "off"
            settings |= {f"tcp_{name}": value for name, value in _KEEPALIVES.items()}
            calls = ", ".join("set_config(%s, %s, false)" for _ in settings)
            db.execute(f"SELECT {calls}".encode(), [str(part) for pair in settings.items() for part in pair])
            if db.info.parameter_status("server_encoding") != "UTF8":
                raise ConfigError(f"queue.store = {self._url}: the database is not encoded in UTF8; create one that is")
        except BaseException:
            db.close()
            raise
        return db

    def open(self) -> Connection:
        """Connect for the first time, and check the layout.

        Raises:
            ConfigError: The database cannot be used: PostgreSQL refuses the connection, or a newer release wrote it.
            psycopg.OperationalError: PostgreSQL cannot be reached now, or takes no connection for a while.
        """
        try:
            db = self.connect()
        except psycopg.Error as refused:
            if self._is_away(refused):
                raise
            try:
                db = self.connect()  # it may have come up between its refusal and its answer
            except psycopg.Error as error:
                raise ConfigError(f"queue.store = {self._url}: {one_line(error)}; {_remedy(error)}") from error
        try:
            self.check_layout(layout_of(db))
        except BaseException as error:
            lost = db.closed
            db.close()
            if isinstance(error, psycopg.Error) and not lost:
                raise ConfigError(f"{self.name}: cannot be read: {one_line(error)}; mend the database") from error
            raise
        return db

    def _is_away(self, error: psycopg.Error) -> bool:
        """Tell whether a connection failed because no server answers, or it takes none now. libpq gives no code."""
        if not isinstance(error, psycopg.OperationalError):
            return False
        if isinstance(error, psycopg.errors.ConnectionTimeout) or _ANSWERS_THAT_PASS.search(str(error)):
            return True
        # Asked without encryption, since a server that cannot do it counts as silent otherwise. It need not let us in.
        plain = psycopg.conninfo.make_conninfo(
            self._url, sslmode="disable", gssencmode="disable", connect_timeout=_CONNECT_S
        )
        answer = psycopg.pq.PGconn.ping(plain.encode())
        return answer in (psycopg.pq.Ping.REJECT, psycopg.pq.Ping.NO_RESPONSE)

    def check_layout(self, layout: int) -> None:
        if layout > len(LAYOUTS):
            raise ConfigError(
                f"{self.name}: written by a newer release of Slipstream (layout {layout}, this one knows "
                f"{len(LAYOUTS)}): upgrade, or choose another run.name"
            )

    def migrate(self, db: Connection) -> None:
        """Bring the schema to the newest layout, from none at all. Hold the run's lock. Raises `psycopg.Error`."""
        before = layout_of(db)
        try:
            self.check_layout(before)
        except ConfigError as error:
            raise StoreError(str(error)) from None
        for number, migration in enumerate(LAYOUTS[before:], before + 1):
            with db.transaction():
                if number == 1:
                    self._create_schema(db)
                for statement in migration.statements:
                    db.execute(statement.encode())
                db.execute(b"UPDATE layout SET number = %s", (number,))
            if before > 0:
                logger.warning("%s: migrated to layout %d: %s", self.name, number, migration.effect)

    def _create_schema(self, db: Connection) -> None:
        try:
            db.execute(f'CREATE SCHEMA "{self.schema}"'.encode())
        except psycopg.errors.InsufficientPrivilege as error:
            raise StoreError(
                f"queue.store = {self._url}: {one_line(error)}; let its user create a schema there: "
                f'GRANT CREATE ON DATABASE "{db.info.dbname}" TO "{db.info.user}"'
            ) from error


def schema_of(run: str) -> str:
    """Return the name of a run's schema."""
    name = f"slipstream_{run}"
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[: _MAX_NAME - 13]}_{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def layout_of(db: Connection) -> int:
    """Return the layout of the connection's schema, 0 if there is none."""
    if not has_schema(db):
        return 0
    ((number,),) = db.execute(b"SELECT number FROM layout")
    return int(number)


def has_schema(db: Connection) -> bool:
    ((found,),) = db.execute(b"SELECT to_regclass('layout') IS NOT NULL")
    return bool(found)


@cache
def adapted(statement: str) -> bytes:
    """Return a statement of `sql` with psycopg's placeholders."""
    return statement.replace("%", "%%").replace("?", "%s").encode()


def _remedy(error: psycopg.Error) -> str:
    """Return what to do about a connection that PostgreSQL refused."""
    connection = error.pgconn
    if connection is not None and connection.needs_password:
        return "put the password into PGPASSWORD or ~/.pgpass"
    if connection is not None and connection.used_password:
        return "mend queue.store, or the password in PGPASSWORD or ~/.pgpass"
    return "mend queue.store"


def one_line(error: psycopg.Error) -> str:
    """Return the text of an error, without its context."""
    return re.sub(r"\s+", " ", str(error).partition("\nCONTEXT")[0]).strip()


def try_lock(db: Connection, schema: str) -> bool:
    """Try to take the lock of a schema's active queue, which is the connection's until it ends."""
    ((taken,),) = db.execute(b"SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", (schema,))
    return bool(taken)


def unlock(db: Connection) -> None:
    """Give the lock back now: a connection that was closed keeps it until PostgreSQL sees that."""
    with suppress(psycopg.Error):
        if not db.closed:
            db.execute(b"SELECT pg_advisory_unlock_all()")
