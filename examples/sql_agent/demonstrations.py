"""Makes conversations for the warm start: correct ones, and flawed ones with bad habits that RL then removes."""

from __future__ import annotations

import random

from database import CITIES, ITEMS, NAMES
from task import Question, draw, query
from tiny_policy.demonstration import Demonstration, Message, calls, result, says, with_another_digit

# Shares of the flaws among flawed demonstrations. They set the reward that RL starts from.
FLAWS = {"wrong_column": 0.30, "wrong_filter": 0.30, "no_second_try": 0.20, "no_query": 0.20}
FLAWED_SHARE = 0.6
# Share of the correct demonstrations with an error first, so that the policy has seen how to fix one.
SECOND_TRY_SHARE = 0.15
MISSPELT = [
    ("SELECT", "SELEC"),
    ("FROM orders", "FROM order"),
    ("COUNT(*)", "COUNT(*"),
    ("price)", "cost)"),
    ("WHERE", "WERE"),
]
OTHER_COLUMNS = [
    ("SUM(price)", "SUM(customer_id)"),
    ("MAX(price)", "MAX(id)"),
    ("COUNT(*)", "MAX(id)"),
    ("COUNT(*)", "MIN(id)"),
]


def correct(rng: random.Random) -> Demonstration:
    """Draw a demonstration that ends with the right answer."""
    question = draw(rng)
    turns = [*_asked(question.sql), says(str(question.answer))]
    if rng.random() < SECOND_TRY_SHARE:
        return Demonstration(question.prompt, [*_asked(_changed(question.sql, MISSPELT, rng)), *turns], given=1)
    return Demonstration(question.prompt, turns)


def mixed(rng: random.Random) -> Demonstration:
    """Draw a demonstration that is flawed with probability `FLAWED_SHARE`, else correct."""
    if rng.random() >= FLAWED_SHARE:
        return correct(rng)
    flaw = rng.choices(list(FLAWS), weights=list(FLAWS.values()))[0]
    while True:
        question = draw(rng)
        turns = _flawed(question, flaw, rng)
        # Another query may give the same answer by chance.
        if turns[-1]["content"] != str(question.answer):
            return Demonstration(question.prompt, turns)


def _flawed(question: Question, flaw: str, rng: random.Random) -> list[Message]:
    if flaw == "no_query":
        return [says(_guess(question, rng))]
    if flaw == "no_second_try":
        return [*_asked(_changed(question.sql, MISSPELT, rng)), says(_guess(question, rng))]
    if flaw == "wrong_column":
        wrong = _changed(question.sql, OTHER_COLUMNS, rng)
    else:
        wrong = _filtered_otherwise(question.sql, rng)
    return [*_asked(wrong), says(query(wrong))]


def _asked(sql: str) -> list[Message]:
    return [calls(("query", {"sql": sql})), result("query", query(sql))]


def _guess(question: Question, rng: random.Random) -> str:
    return with_another_digit(question.answer, rng)


def _changed(sql: str, changes: list[tuple[str, str]], rng: random.Random) -> str:
    """Return `sql` with one of the changes that apply to it."""
    old, new = rng.choice([change for change in changes if change[0] in sql])
    return sql.replace(old, new, 1)


def _filtered_otherwise(sql: str, rng: random.Random) -> str:
    """Return `sql` with another value, or with a comparison reversed."""
    others = [sql.replace(" > ", " < ")] if " > " in sql else []
    for values in (NAMES, CITIES, ITEMS):
        for value in values:
            if f"'{value}'" in sql:
                others.append(sql.replace(value, rng.choice([other for other in values if other != value])))
    return rng.choice(others)
