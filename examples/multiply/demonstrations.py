"""Makes conversations for the warm start: correct ones, and flawed ones with bad habits that RL then removes."""

from __future__ import annotations

import random

from task import number
from tiny_policy.demonstration import Demonstration, Message, calls, result, says, with_another_digit

# Shares of the flaws among flawed demonstrations. They set the reward that RL starts from.
FLAWS = {"no_tool": 0.40, "wrong_argument": 0.25, "malformed_call": 0.15, "misquote": 0.20}
FLAWED_SHARE = 0.6


def correct(rng: random.Random) -> Demonstration:
    """Draw a demonstration that calls the tool correctly and quotes its result."""
    a, b = number(rng), number(rng)
    return _conversation(a, b, a, b, str(a * b))


def mixed(rng: random.Random) -> Demonstration:
    """Draw a demonstration that is flawed with probability `FLAWED_SHARE`, else correct."""
    if rng.random() >= FLAWED_SHARE:
        return correct(rng)
    a, b = number(rng), number(rng)
    flaw = rng.choices(list(FLAWS), weights=list(FLAWS.values()))[0]
    if flaw == "no_tool":
        return Demonstration(_prompt(a, b), [says(with_another_digit(a * b, rng))])
    if flaw == "wrong_argument":
        wrong = int(with_another_digit(a, rng))
        return _conversation(a, b, wrong, b, str(wrong * b))
    if flaw == "misquote":
        return _conversation(a, b, a, b, with_another_digit(a * b, rng))
    return Demonstration(
        _prompt(a, b),
        [
            says(f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, {b}</tool_call>'),
            result("multiply", {"error": "malformed tool call"}),
            says(with_another_digit(a * b, rng)),
        ],
    )


def _prompt(a: int, b: int) -> list[Message]:
    return [{"role": "user", "content": f"Multiply {a} by {b}."}]


def _conversation(a: int, b: int, called_a: int, called_b: int, answer: str) -> Demonstration:
    return Demonstration(
        _prompt(a, b),
        [
            calls(("multiply", {"a": called_a, "b": called_b})),
            result("multiply", called_a * called_b),
            says(answer),
        ],
    )
