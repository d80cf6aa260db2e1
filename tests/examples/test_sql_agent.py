"""The SQL example: what a query may do, and what the policy is told of one that it may not do."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from tests.examples.conftest import Load

NAME = "sql_agent"


def test_the_database_has_the_same_rows_wherever_it_is_made(load: Load, tmp_path: Path) -> None:
    database = load("database")
    rows = [
        list(sqlite3.connect(database.build(tmp_path / name)).execute("SELECT * FROM orders, customers"))
        for name in ("a.db", "b.db")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 300 * len(database.NAMES)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.db", "b.db"]


def test_every_question_has_a_number_for_an_answer(load: Load) -> None:
    assert all(row["answer"].isdigit() for row in load("task").rows(3000, seed=5))


def test_rows_come_as_lines_and_no_more_than_a_few(load: Load) -> None:
    query = load("task").query
    assert query("SELECT id, name FROM customers ORDER BY id LIMIT 2") == "1 | Ada\n2 | Ben"
    assert query("SELECT id FROM orders ORDER BY id").splitlines() == ["1", "2", "3", "4", "5", "(more rows)"]
    assert query("SELECT name FROM customers WHERE id < 0") == "(no rows)"
    assert query("SELECT NULL") == "None"


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("DROP TABLE orders", "not authorized"),
        ("DELETE FROM orders", "not authorized"),
        ("UPDATE orders SET price = 0", "not authorized"),
        ("INSERT INTO customers VALUES (99, 'x', 'y')", "not authorized"),
        ("CREATE TEMP TABLE t (x)", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("ATTACH '/tmp/other.db' AS other", "not authorized"),
        ("VACUUM INTO '/tmp/copy.db'", "denied"),
        ("BEGIN EXCLUSIVE", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT 1; DROP TABLE orders", "one statement"),
        ("SELECT name FROM customers WHERE name = '' OR 1 = 1; DELETE FROM orders --'", "one statement"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("SELECT town FROM customers", "no such column: town"),
        ("SELEC 1", "syntax error"),
        ("SELECT '\0'", "null character"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT 1 /*" + "x" * 20_000, "too big"),
        ("", "no rows"),
    ],
)
def test_what_is_not_a_read_is_refused_with_a_text(load: Load, sql: str, told: str) -> None:
    before = load("database").FILE.read_bytes()
    assert told in load("task").query(sql)
    assert load("database").FILE.read_bytes() == before


def test_the_file_is_opened_for_reading_even_without_the_authorizer(load: Load, tmp_path: Path) -> None:
    database = load("database")
    with database._opened(database.build(tmp_path / "shop.db")) as connection:
        connection.set_authorizer(None)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM orders")


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT COUNT(*) FROM t", "longer than"),
        ("SELECT COUNT(*) FROM orders a, orders b, orders c, orders d, orders e", "longer than"),
        ("SELECT randomblob(1000000000)", "too big"),
        ("SELECT replace(hex(zeroblob(4000)), '0', 'xxxxxxxxxx')", "too big"),
        ("SELECT 'x' LIKE '" + "%x" * 400 + "'", "too complex"),
    ],
)
def test_what_would_not_end_or_not_fit_is_ended(
    load: Load, sql: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("database"), "MAX_SECONDS", 0.05)
    assert told in load("task").query(sql)


def test_the_warm_start_shows_how_an_error_is_mended_and_does_not_teach_the_error(load: Load) -> None:
    demonstrations = load("demonstrations")
    rng = random.Random(0)
    repaired = [demo for demo in (demonstrations.correct(rng) for _ in range(100)) if demo.given]
    assert repaired
    assert all(demo.turns[1]["content"].startswith("error: ") for demo in repaired)
