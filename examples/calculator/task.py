"""Defines a task: work out an expression with a calculator.

It needs several tools, parallel calls, and calls that need earlier results.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from slipstream import Task


def add(a: int, b: int) -> int:
    """a + b

    Args:
        a: First.
        b: Second.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """a - b

    Args:
        a: First.
        b: Second.
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """a * b

    Args:
        a: First.
        b: Second.
    """
    return a * b


def divide(a: int, b: int) -> int:
    """a / b, rounded down

    Args:
        a: First.
        b: Second, not 0.
    """
    return a // b


TOOLS: dict[str, Callable[[int, int], int]] = {"+": add, "-": subtract, "*": multiply, "/": divide}
LARGEST = 20  # Largest number in an expression.
VALUES = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


class Pair(NamedTuple):
    """Holds two numbers and the sign that joins them."""

    a: int
    sign: str
    b: int

    def __str__(self) -> str:
        return f"({self.a} {self.sign} {self.b})"

    @property
    def value(self) -> int:
        return VALUES[self.sign](self.a, self.b)


class Expression(NamedTuple):
    """Holds two sides and the sign that joins them. A side that is a pair has to be worked out first."""

    left: Pair | int
    sign: str
    right: Pair | int

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"

    @property
    def pairs(self) -> list[Pair]:
        return [side for side in (self.left, self.right) if isinstance(side, Pair)]

    @property
    def value(self) -> int:
        return joined(self).value


def joined(expression: Expression) -> Pair:
    """Return the last step of an expression: the values of its sides, joined."""
    left, sign, right = expression
    return Pair(left.value if isinstance(left, Pair) else left, sign, right.value if isinstance(right, Pair) else right)


def draw(rng: random.Random) -> Expression:
    """Draw an expression of one pair and a number, in either order, or of two pairs.

    No result is below zero, and divisions have no remainder.
    """
    sides: list[Pair | int] = [_pair(rng), _pair(rng) if rng.random() < 0.5 else rng.randint(1, LARGEST)]
    if rng.random() < 0.5:
        sides.reverse()
    whole = joined(Expression(sides[0], "+", sides[1]))
    signs = ["+", "*"]
    if whole.a >= whole.b:
        signs.append("-")
    if whole.b and whole.a % whole.b == 0:
        signs.append("/")
    return Expression(sides[0], rng.choice(signs), sides[1])


def _pair(rng: random.Random) -> Pair:
    sign = rng.choice("+-*/")
    a, b = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    if sign == "-" and a < b:
        a, b = b, a
    if sign == "/":
        b = rng.randint(2, LARGEST // 2)
        a = b * rng.randint(1, LARGEST // b)
    return Pair(a, sign, b)


def prompt(expression: Expression) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{expression} ="}]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` prompts, each with the answer that the reward compares with."""
    rng = random.Random(seed)
    drawn = (draw(rng) for _ in range(count))
    return [{"prompt": prompt(expression), "answer": expression.value} for expression in drawn]


def accuracy(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """Return 1.0 for each completion with the value alone as its last message, else 0.0."""
    return [
        float(completion[-1]["content"] == str(right)) for completion, right in zip(completions, answer, strict=True)
    ]


task = Task(dataset=rows(4096, seed=1), tools=list(TOOLS.values()), rewards=[accuracy])
