"""Conversations for the warm start: correct ones, and flawed ones whose habits RL then removes."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from task import number

Message = dict[str, Any]

# Shares of the flaws among flawed demonstrations; they set the reward that RL starts from.
FLAWS = {"no_tool": 0.40, "wrong_argument": 0.25, "malformed_call": 0.15, "misquote": 0.20}
FLAWED_SHARE = 0.6


class Demonstration(NamedTuple):
    prompt: list[Message]
    turns: list[Message]


def correct(rng: random.Random) -> Demonstration:
    a, b = number(rng), number(rng)
    return _conversation(a, b, a, b, str(a * b))


def mixed(rng: random.Random) -> Demonstration:
    """Flawed with probability `FLAWED_SHARE`, else correct."""
    if rng.random() >= FLAWED_SHARE:
        return correct(rng)
    a, b = number(rng), number(rng)
    flaw = rng.choices(list(FLAWS), weights=list(FLAWS.values()))[0]
    if flaw == "no_tool":
        return Demonstration(_prompt(a, b), [{"role": "assistant", "content": _other_number(a * b, rng)}])
    if flaw == "wrong_argument":
        wrong = int(_other_number(a, rng))
        return _conversation(a, b, wrong, b, str(wrong * b))
    if flaw == "misquote":
        return _conversation(a, b, a, b, _other_number(a * b, rng))
    return Demonstration(
        _prompt(a, b),
        [
            {
                "role": "assistant",
                "content": f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, {b}</tool_call>',
            },
            {"role": "tool", "name": "multiply", "content": '{"error": "malformed tool call"}'},
            {"role": "assistant", "content": _other_number(a * b, rng)},
        ],
    )


def _prompt(a: int, b: int) -> list[Message]:
    return [{"role": "user", "content": f"Multiply {a} by {b}."}]


def _conversation(a: int, b: int, called_a: int, called_b: int, answer: str) -> Demonstration:
    call = {"name": "multiply", "arguments": {"a": called_a, "b": called_b}}
    return Demonstration(
        _prompt(a, b),
        [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "multiply", "content": json.dumps(called_a * called_b)},
            {"role": "assistant", "content": answer},
        ],
    )


def _other_number(value: int, rng: random.Random) -> str:
    """`value` with one digit changed."""
    digits = list(str(value))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([digit for digit in "123456789" if digit != digits[place]])
    return "".join(digits)
