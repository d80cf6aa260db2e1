"""Makes conversations for the warm start: correct ones, and ones that name a wrong colour, which RL then removes."""

from __future__ import annotations

import random

from task import COLOURS, draw, picture_of
from tiny_policy.demonstration import Demonstration, calls, says

# Share of wrong answers among the flawed demonstrations. It sets the reward that RL starts from.
WRONG = 0.6


def correct(rng: random.Random) -> Demonstration:
    """Draw a demonstration that names the colour, of one of the two tasks."""
    return _conversation(rng, wrong=0.0)


def mixed(rng: random.Random) -> Demonstration:
    """Draw a demonstration that names another colour with probability `WRONG`."""
    return _conversation(rng, WRONG)


def _conversation(rng: random.Random, wrong: float) -> Demonstration:
    colour = rng.choice(sorted(COLOURS))
    if rng.random() < 0.5:
        image = {"type": "image", "image": draw(colour, rng)}
        prompt = [{"role": "user", "content": [image, {"type": "text", "text": "Which colour?"}]}]
        return Demonstration(prompt, [says(_answer(colour, rng, wrong))])
    box = rng.randint(0, 999)
    colour, picture = picture_of(box)
    found = {"role": "tool", "name": "open_box", "content": [{"type": "image", "image": picture}]}
    turns = [calls(("open_box", {"number": box})), found, says(_answer(colour, rng, wrong))]
    return Demonstration([{"role": "user", "content": f"Which colour is in box {box}?"}], turns)


def _answer(colour: str, rng: random.Random, wrong: float) -> str:
    return rng.choice(sorted(COLOURS)) if rng.random() < wrong else colour
