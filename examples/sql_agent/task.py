"""Defines a task: answer questions about a shop with queries on a real SQLite database.

The policy writes a query, reads its result, and gives the answer.
"""

from __future__ import annotations

import random
import sqlite3
from functools import cache
from typing import Any, NamedTuple

from database import CITIES, ITEMS, MAX_ROWS, NAMES, build, select

from slipstream import Task

build()


def query(sql: str) -> str:
    """Run one SELECT on customers(id, name, city) and orders(id, customer_id, item, price).

    Args:
        sql: The query.
    """
    try:
        rows = select(sql)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return f"error: {error}"
    lines = [" | ".join(map(str, row)) for row in rows[:MAX_ROWS]]
    return "\n".join([*lines, *["(more rows)"] * (len(rows) > MAX_ROWS)]) or "(no rows)"


_ORDERS = "FROM orders JOIN customers ON customers.id = customer_id WHERE"
# Each question, and the query that answers it.
TEMPLATES = [
    ("How many customers live in {city}?", "SELECT COUNT(*) FROM customers WHERE city = '{city}'"),
    ("How many orders did {name} place?", f"SELECT COUNT(*) {_ORDERS} name = '{{name}}'"),
    ("How much did {name} spend?", f"SELECT SUM(price) {_ORDERS} name = '{{name}}'"),
    ("How much did {city} spend on a {item}?", f"SELECT SUM(price) {_ORDERS} city = '{{city}}' AND item = '{{item}}'"),
    ("What is the highest price that {name} paid?", f"SELECT MAX(price) {_ORDERS} name = '{{name}}'"),
    ("How many orders cost more than {price}?", "SELECT COUNT(*) FROM orders WHERE price > {price}"),
    (
        "How many orders of a {item} above {price} went to {city}?",
        f"SELECT COUNT(*) {_ORDERS} item = '{{item}}' AND price > {{price}} AND city = '{{city}}'",
    ),
]


@cache
def _answered(sql: str) -> int | None:
    """Return the answer of a query. Cached because many rows ask the same."""
    return select(sql)[0][0]


class Question(NamedTuple):
    text: str
    sql: str

    @property
    def answer(self) -> int | None:
        return _answered(self.sql)

    @property
    def prompt(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]


def draw(rng: random.Random) -> Question:
    """Draw a question that has an answer. A sum over no orders has none."""
    while True:
        values = {
            "city": rng.choice(CITIES),
            "name": rng.choice(NAMES),
            "item": rng.choice(ITEMS),
            "price": rng.randint(10, 90),
        }
        text, sql = rng.choice(TEMPLATES)
        question = Question(text.format(**values), sql.format(**values))
        if question.answer is not None:
            return question


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` prompts, each with the answer from the database."""
    rng = random.Random(seed)
    drawn = (draw(rng) for _ in range(count))
    return [{"prompt": question.prompt, "answer": str(question.answer)} for question in drawn]


def accuracy(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """Return 1.0 for each completion with the answer alone as its last message, else 0.0."""
    return [float(completion[-1]["content"] == right) for completion, right in zip(completions, answer, strict=True)]


task = Task(dataset=rows(4096, seed=1), tools=[query], rewards=[accuracy])
