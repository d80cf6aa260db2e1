"""Builds the shop's database and runs the policy's queries on it.

A SELECT is the only thing that the policy can do with it. Time, rows and memory of a query are bounded.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("shop.db")
SEED = 20
MAX_ROWS = 5
MAX_SECONDS = 0.5  # CPU time, so that a busy machine does not end a query.
MAX_CELL_BYTES = 10_000

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Delhi", "Perth", "Quito", "Seoul"]
ITEMS = ["lamp", "desk", "chair", "clock", "mirror", "carpet"]
NAMES = [
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jack", "Kira", "Liam", "Mona", "Nils"),
    *("Olga", "Paul", "Quin", "Rosa", "Sven", "Tara", "Ugo", "Vera", "Walt", "Xena", "Yuri", "Zoe", "Amos", "Bella"),
    *("Carl", "Dora", "Emil", "Fay"),
]
SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer_id INTEGER NOT NULL REFERENCES customers,
    item TEXT NOT NULL,
    price INTEGER NOT NULL
);
"""

# A SELECT needs these. Anything else, such as a PRAGMA, ATTACH or a write, is refused before it begins.
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def build(file: Path = FILE) -> Path:
    """Build the database if it is missing, and return its path. The rows are the same everywhere."""
    if file.exists():
        return file
    rng = random.Random(SEED)
    customers = [(number, name, rng.choice(CITIES)) for number, name in enumerate(NAMES, start=1)]
    orders = [(number, rng.randint(1, len(NAMES)), rng.choice(ITEMS), rng.randint(5, 99)) for number in range(1, 301)]
    unfinished = file.with_name(f"{file.name}.tmp{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    with closing(sqlite3.connect(unfinished)) as connection, connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO customers VALUES (?, ?, ?)", customers)
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", orders)
    os.replace(unfinished, file)
    return file


def select(sql: str, file: Path = FILE) -> list[tuple[Any, ...]]:
    """Run one SELECT.

    Args:
        sql: The query.
        file: The database.

    Returns:
        The first MAX_ROWS rows, and one more if there are more.

    Raises:
        sqlite3.Error: If the query fails or takes too long, with a text for the policy.
    """
    with _opened(file) as connection:
        try:
            return connection.execute(sql).fetchmany(MAX_ROWS + 1)
        except sqlite3.OperationalError as error:
            if str(error) != "interrupted":
                raise
            raise sqlite3.OperationalError(f"the query took longer than {MAX_SECONDS} s") from None


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection for one query. It can only read this file, and ends the query after MAX_SECONDS."""
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        # SQLite allows a cell of 1 GB by default, and makes it in one step, which no deadline interrupts.
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
        deadline = time.thread_time() + MAX_SECONDS
        connection.set_progress_handler(lambda: time.thread_time() > deadline, 1000)
        yield connection
