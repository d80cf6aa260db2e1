"""Defines a task with tools: sums and differences of two-digit numbers from Reasoning Gym, worked out by functions.

SmolLM2-135M calls no tool if a prompt only describes it. Four calls in the prompt show it how. A share of the reward is
for a call alone, so that there is something to learn from before the first answer is right.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym
from task import correct

from slipstream import Task

HELD_OUT = 64

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
SUMS = reasoning_gym.create_dataset("chain_sum", size=1000, seed=0, **TWO_DIGITS)

QUESTION = "State the final answer to the following arithmetic problem: {a} {sign} {b} ="

# Shown in each prompt, and asked in none.
SHOWN = (("add", 27, 46), ("subtract", 15, 88), ("subtract", 61, 13), ("add", 94, 72))

SIGNS = {"add": "+", "subtract": "-"}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract the second number from the first.

    Args:
        a: The first number.
        b: The second number.
    """
    return a - b


def shown(name: str, a: int, b: int) -> list[dict[str, Any]]:
    """Return a question and the call that answers it."""
    call = {"type": "function", "function": {"name": name, "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": QUESTION.format(a=a, sign=SIGNS[name], b=b)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def rows() -> list[dict[str, Any]]:
    """List each question once, but for those that are shown, in the order in which Reasoning Gym draws them."""
    examples = [message for each in SHOWN for message in shown(*each)]
    answers = {entry["question"]: entry["answer"] for entry in SUMS}
    taken = {message["content"] for message in examples}
    return [
        {"prompt": [*examples, {"role": "user", "content": question}], "answer": answer}
        for question, answer in answers.items()
        if question not in taken
    ]


def called(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """Score 1.0 for an episode with a call."""
    return [float(any(message.get("tool_calls") for message in completion)) for completion in completions]


questions = rows()
task = Task(
    dataset=questions[HELD_OUT:],
    eval_dataset=questions[:HELD_OUT],
    tools=[add, subtract],
    rewards=[called, correct],
    reward_weights=[0.5, 1.0],
)
