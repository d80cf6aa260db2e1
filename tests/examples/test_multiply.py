"""The multiply example: its task, and the demonstrations that its warm start learns from."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.examples.conftest import Load

NAME = "multiply"


def test_the_reward_wants_the_product_and_nothing_else(load: Load) -> None:
    said = ["144", " 144", "144.", "143", ""]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    assert load("task").accuracy(completions, answer=[144] * len(said)) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_flawed_demonstrations_earn_nothing_and_correct_ones_all(load: Load) -> None:
    demonstrations, task = load("demonstrations"), load("task")
    rng = random.Random(0)
    rewards: Counter[float] = Counter()
    for _ in range(500):
        demo = demonstrations.mixed(rng)
        a, b = (int(word.strip(".")) for word in demo.prompt[0]["content"].split() if word.strip(".").isdigit())
        rewards[task.accuracy([demo.turns], answer=[a * b])[0]] += 1
    assert rewards[0.0] / 500 == pytest.approx(demonstrations.FLAWED_SHARE, abs=0.07)


def test_the_policy_is_the_one_that_the_measurements_were_made_with(load: Load) -> None:
    """The drawn problems and their tokens are fixed: the warm start depends on nothing else but torch."""
    demonstrations = load("demonstrations")
    rng = random.Random(0)
    drawn = [demonstrations.correct(rng) for _ in range(3)] + [demonstrations.mixed(rng) for _ in range(3)]
    assert [demo.prompt[0]["content"] for demo in drawn] == [
        *("Multiply 63 by 4.", "Multiply 597 by 48.", "Multiply 55 by 323."),
        *("Multiply 27 by 9.", "Multiply 175 by 438.", "Multiply 755 by 8."),
    ]
    assert [demo.turns[-1]["content"] for demo in drawn] == ["252", "28656", "17765", "244", "339450", "6048"]
    assert rng.random() == 0.06227958802154521
