"""Defines a task: answer a question by a short program.

Its one tool runs Python. All code of the policy runs in a sealed process.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from slipstream import Task
from slipstream.sandboxes import SealedSandbox

_SANDBOX = SealedSandbox()

WORDS = [
    *("banana", "letter", "pepper", "cheese", "potato", "butter", "carrot", "tomato", "orange", "coffee"),
    *("window", "bottle", "pillow", "mirror", "hammer", "ladder", "needle", "carpet", "kettle", "basket"),
    *("sister", "doctor", "teacher", "farmer", "sailor", "dancer", "tailor", "soldier", "barber", "hunter"),
]
LETTERS = "aeort"
# Each question, and the expression that a program has to print.
TEMPLATES = [
    ("Sum all from {low} to {high}.", "sum(range({low}, {high} + 1))"),
    ("Sum the squares from {low} to {high}.", "sum(i * i for i in range({low}, {high} + 1))"),
    ("How many from {low} to {high} does {by} divide?", "sum(i % {by} == 0 for i in range({low}, {high} + 1))"),
    ("How often is {letter} in {word}?", "'{word}'.count('{letter}')"),
    ("How long are {word} and {other}?", "len('{word}' + '{other}')"),
]


def python(code: str) -> str:
    """Run a program.

    Args:
        code: A Python program; its output is returned.
    """
    return _SANDBOX.run(code) or "(nothing printed)"


class Question(NamedTuple):
    """Holds a question, and a Python expression that has the answer as its value."""

    text: str
    expression: str

    @property
    def prompt(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]

    @property
    def answer(self) -> int:
        return eval(self.expression)  # Safe: the expression is always from the templates above.


def draw(rng: random.Random) -> Question:
    low = rng.randint(1, 49)
    values = {
        "low": low,
        "high": rng.randint(low + 1, 99),
        "by": rng.randint(2, 9),
        "letter": rng.choice(LETTERS),
        "word": rng.choice(WORDS),
        "other": rng.choice(WORDS),
    }
    text, expression = rng.choice(TEMPLATES)
    return Question(text.format(**values), expression.format(**values))


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` prompts, each with the answer that the reward compares with."""
    rng = random.Random(seed)
    drawn = (draw(rng) for _ in range(count))
    return [{"prompt": question.prompt, "answer": question.answer} for question in drawn]


def accuracy(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """Return 1.0 for each completion with the answer alone as its last message, else 0.0."""
    return [
        float(completion[-1]["content"] == str(right)) for completion, right in zip(completions, answer, strict=True)
    ]


task = Task(dataset=rows(4096, seed=1), tools=[python], rewards=[accuracy])
