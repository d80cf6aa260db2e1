"""Defines a conversation of a warm start and its messages."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

Message = dict[str, Any]


class Demonstration(NamedTuple):
    """Holds one conversation.

    Attributes:
        prompt: Messages of the prompt.
        turns: Messages after the prompt: the policy's, and the answers to them.
        given: Number of the policy's first messages that it is shown and not taught, such as an error to fix.
        tools: Schemas of the tools that its prompt names; None: the recipe's.
    """

    prompt: list[Message]
    turns: list[Message]
    given: int = 0
    tools: list[dict[str, Any]] | None = None


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    """Make a turn with one call for each (tool, arguments)."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in named]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


def result(tool: str, value: Any) -> Message:
    """Make a tool's answer as the worker writes it: text unchanged, everything else as JSON."""
    return {"role": "tool", "name": tool, "content": value if isinstance(value, str) else json.dumps(value)}


def with_another_digit(value: int, rng: random.Random) -> str:
    """Return `value` as text with one digit changed."""
    digits = list(str(value))
    place = rng.choice([place for place, digit in enumerate(digits) if digit.isdigit()])
    digits[place] = rng.choice([digit for digit in "123456789" if digit != digits[place]])
    return "".join(digits)
