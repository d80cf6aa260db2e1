"""Defines a task of several turns without tools: after a wrong answer the policy may try again.

The environment answers each wrong turn. A right answer ends the episode; `rollout.max_turns` bounds the tries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from task import HELD_OUT, correct, rows

from slipstream import Task

# The reward of a right answer is multiplied by this for each wrong one before it.
DISCOUNT = 0.5

WRONG = "That is wrong. Try again. Write the number only."


class Tries:
    """Holds the answer of one episode."""

    def reset(self, answer: str, **_: Any) -> None:
        """Begin an episode with a column of the row."""
        self._answer = answer

    def respond(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Answer a turn of the policy: None, which ends the episode, if it is right."""
        return None if _is_right(messages[-1], self._answer) else WRONG


def early(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """Score an episode: 1.0 for a right answer at once, less for each wrong one before it, 0.0 without one."""
    return [_score(messages, expected) for messages, expected in zip(completions, answer, strict=True)]


def _score(messages: Sequence[Mapping[str, Any]], answer: str) -> float:
    turns = [message for message in messages if message["role"] == "assistant"]
    return next((DISCOUNT**at for at, turn in enumerate(turns) if _is_right(turn, answer)), 0.0)


def _is_right(turn: Mapping[str, Any], answer: str) -> bool:
    return correct([[{"content": turn["content"] or ""}]], [answer]) == [1.0]


questions = rows()
task = Task(dataset=questions[HELD_OUT:], eval_dataset=questions[:HELD_OUT], environment=Tries, rewards=[early])
