"""Defines the smallest task that needs a tool call and its result: multiply two numbers with a calculator."""

from __future__ import annotations

import random
from typing import Any

from slipstream import Task


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


def accuracy(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """Return 1.0 for each completion with the product alone as its last message, else 0.0."""
    return [
        float(completion[-1]["content"] == str(right)) for completion, right in zip(completions, answer, strict=True)
    ]


def number(rng: random.Random) -> int:
    """Draw a number of one to three digits, each length equally likely."""
    digits = rng.randint(1, 3)
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` prompts, each with the answer that the reward compares with."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        a, b = number(rng), number(rng)
        found.append({"prompt": [{"role": "user", "content": f"Multiply {a} by {b}."}], "answer": a * b})
    return found


task = Task(dataset=rows(4096, seed=1), tools=[multiply], rewards=[accuracy])
