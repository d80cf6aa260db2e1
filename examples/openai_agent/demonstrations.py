"""Makes conversations for the warm start: correct ones, and flawed ones with bad habits that RL then removes.

Some continue after the first answer, as the program does if two answers differ.
"""

from __future__ import annotations

import random

from task import disagreement, number, question
from tiny_policy.demonstration import Demonstration, Message, calls, result, says, with_another_digit

# Shares of the flaws among flawed demonstrations. They set the reward that RL starts from.
FLAWS = {"no_tool": 0.40, "wrong_argument": 0.30, "misquote": 0.30}
FLAWED_SHARE = 0.5


def correct(rng: random.Random) -> Demonstration:
    """Draw a demonstration without a flaw."""
    return _conversation(rng, number(rng), number(rng), flaw=None)


def mixed(rng: random.Random) -> Demonstration:
    """Draw a demonstration that is flawed with probability `FLAWED_SHARE`, else correct."""
    if rng.random() >= FLAWED_SHARE:
        return correct(rng)
    flaw = rng.choices(list(FLAWS), weights=list(FLAWS.values()))[0]
    return _conversation(rng, number(rng), number(rng), flaw)


def _conversation(rng: random.Random, a: int, b: int, flaw: str | None) -> Demonstration:
    turns = _answered(rng, a, b, flaw)
    if rng.random() < 0.3:
        turns += [disagreement(with_another_digit(a * b, rng)), *_answered(rng, a, b, flaw)]
    return Demonstration([question(a, b)], turns)


def _answered(rng: random.Random, a: int, b: int, flaw: str | None) -> list[Message]:
    if flaw == "no_tool":
        return [says(with_another_digit(a * b, rng))]
    called = {"a": int(with_another_digit(a, rng)) if flaw == "wrong_argument" else a, "b": b}
    product = called["a"] * b
    answer = with_another_digit(product, rng) if flaw == "misquote" else str(product)
    return [calls(("multiply", called)), result("multiply", str(product)), says(answer)]
