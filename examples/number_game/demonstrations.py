"""Makes games for the warm start: well played ones, and flawed ones with bad habits that RL then removes."""

from __future__ import annotations

import random

from task import RANGES, NumberGame, prompt
from tiny_policy.demonstration import Demonstration, Message, calls, result, says

# Shares of the flaws among flawed demonstrations. They set the reward that RL starts from.
FLAWS = {"repeats": 0.30, "out_of_range": 0.25, "wrong_way": 0.20, "gives_up": 0.25}
FLAWED_SHARE = 0.6
FOUND, GAVE_UP = "I found it.", "I give up."


class Player:
    """Plays a game and records it.

    Attributes:
        largest: Largest number of the game.
        low: Smallest number that is still possible.
        high: Largest number that is still possible.
        found: Whether the number was guessed.
        guessed: The last guess.
    """

    def __init__(self, rng: random.Random) -> None:
        self.largest = rng.choice(RANGES)
        self.low, self.high = 1, self.largest
        self.found = False
        self.guessed = 0
        self._game = NumberGame()
        asked = prompt()
        asked[-1]["content"] += self._game.reset(rng.randint(1, self.largest), self.largest)
        self._prompt = asked
        self._turns: list[Message] = []

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    def guess(self, number: int) -> None:
        self.guessed = number
        answer = self._game.guess(number)
        self._turns += [calls(("guess", {"number": number})), result("guess", answer)]
        if answer == "higher":
            self.low = max(self.low, number + 1)
        elif answer == "lower":
            self.high = min(self.high, number - 1)
        self.found = self.found or answer == "correct"

    def halve(self, guesses: int = 99) -> None:
        """Make at most `guesses` of the best guesses."""
        while not self.found and guesses > 0:
            self.guess(self.middle)
            guesses -= 1

    def ended(self, text: str) -> Demonstration:
        return Demonstration(self._prompt, [*self._turns, says(text)])


def correct(rng: random.Random) -> Demonstration:
    """Draw a game that guesses the middle of the remaining range until it finds the number."""
    player = Player(rng)
    player.halve()
    return player.ended(FOUND)


def mixed(rng: random.Random) -> Demonstration:
    """Draw a game that is flawed with probability `FLAWED_SHARE`, else well played."""
    if rng.random() >= FLAWED_SHARE:
        return correct(rng)
    player = Player(rng)
    flaw = rng.choices(list(FLAWS), weights=list(FLAWS.values()))[0]
    if flaw == "out_of_range":
        player.guess(player.largest + rng.randint(1, 9))
        player.halve()
        return player.ended(FOUND)
    player.halve(rng.randint(1, 2))
    if player.found:
        return player.ended(FOUND)
    if flaw == "gives_up":
        return player.ended(GAVE_UP)
    if flaw == "wrong_way":
        player.guess(rng.choice([*range(1, player.low), *range(player.high + 1, player.largest + 1)]))
        return player.ended(GAVE_UP)
    last = player.guessed
    for _ in range(rng.randint(1, 3)):
        player.guess(last)
    player.halve()
    return player.ended(FOUND)
