"""Defines the task: sums and differences of two digits from Reasoning Gym, which also scores the answers.

There are 200 such questions. 64 of them are held out for the evaluations, and never trained on.
"""

from __future__ import annotations

import re
from typing import Any

import reasoning_gym

from slipstream import Task

HELD_OUT = 64

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SUMS = reasoning_gym.create_dataset("chain_sum", size=3000, seed=0, **ONE_DIGIT)


def rows() -> list[dict[str, Any]]:
    """List each question once, in the order in which Reasoning Gym draws them."""
    entries = {entry["question"]: entry for entry in SUMS}
    asked: list[dict[str, Any]] = [{"role": "system", "content": "Answer with the number only."}]
    return [
        {"prompt": [*asked, {"role": "user", "content": question}], "answer": entry["answer"]}
        for question, entry in entries.items()
    ]


def last_number(text: str) -> str:
    """Return the last number of a text, "" without one."""
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else ""


def correct(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """Score the last number of each completion as Reasoning Gym does: 1.0 or less."""
    return [
        SUMS.score_answer(last_number(completion[-1]["content"]), {"answer": expected})
        for completion, expected in zip(completions, answer, strict=True)
    ]


questions = rows()
task = Task(dataset=questions[HELD_OUT:], eval_dataset=questions[:HELD_OUT], rewards=[correct])
