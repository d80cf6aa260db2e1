"""Defines a task: guess a secret number.

The environment remembers its game, gives the policy a tool, and computes the reward.
"""

from __future__ import annotations

import random
from typing import Any

from slipstream import Task

# Largest numbers of the games. Halving finds a number up to 7 in 3 guesses, up to 15 in 4, up to 31 in 5.
RANGES = (7, 15, 31)


class NumberGame:
    """One game at a time; `reset` begins the next. Its public methods, but for those, are the policy's tools."""

    def reset(self, secret: int, largest: int, **_: Any) -> str:
        """Begin a game with two columns of the row. The returned text is appended to the prompt."""
        self._secret = secret
        self._largest = largest
        self._guesses = 0
        self._found = False
        return f" It is between 1 and {largest}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self._guesses += 1
        if not 1 <= number <= self._largest:
            return "out of range"
        if number == self._secret:
            self._found = True
            return "correct"
        return "higher" if number < self._secret else "lower"

    def get_reward(self) -> float:
        """1.0 for a number that was found in as few guesses as halving takes at most, a quarter less for each more."""
        if not self._found:
            return 0.0
        return max(0.0, 1.0 - 0.25 * max(0, self._guesses - self._largest.bit_length()))


def prompt() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Guess my number."}]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw `count` games. A group's episodes all play the same one."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        largest = rng.choice(RANGES)
        found.append({"prompt": prompt(), "secret": rng.randint(1, largest), "largest": largest})
    return found


task = Task(dataset=rows(4096, seed=1), environment=NumberGame)
