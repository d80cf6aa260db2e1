"""One conversation of a warm start, and the messages that it is made of."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

Message = dict[str, Any]


class Demonstration(NamedTuple):
    """`turns`: what follows the prompt, the policy's messages and the answers to them. `given`: of the policy's first
    messages, how many it is shown and not taught, such as an error that it is to mend."""

    prompt: list[Message]
    turns: list[Message]
    given: int = 0


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    """A turn with one call for each (tool, arguments)."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in named]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


def result(tool: str, value: Any) -> Message:
    """A tool's answer, as the worker writes it: text as it is, all else as JSON."""
    return {"role": "tool", "name": tool, "content": value if isinstance(value, str) else json.dumps(value)}


def with_another_digit(value: int, rng: random.Random) -> str:
    """`value` with one digit changed."""
    digits = list(str(value))
    place = rng.choice([place for place, digit in enumerate(digits) if digit.isdigit()])
    digits[place] = rng.choice([digit for digit in "123456789" if digit != digits[place]])
    return "".join(digits)
