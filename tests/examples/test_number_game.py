"""The number_game example: its environment, and the games that its warm start learns from."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.examples.conftest import Load
from tests.kit.fake_vllm.policies import in_turn, scripted
from tests.kit.worker import TOKENIZER, fake, roll

NAME = "number_game"


@pytest.fixture
def game(load: Load) -> Any:
    """A game whose number is 5, of 1 to 7: found in at most 3 guesses."""
    game = load("task").NumberGame()
    assert game.reset(secret=5, largest=7) == " It is between 1 and 7."
    return game


@pytest.mark.parametrize(
    ("guesses", "answers", "reward"),
    [
        ([4, 6, 5], ["higher", "lower", "correct"], 1.0),
        ([5], ["correct"], 1.0),
        ([4, 4, 6, 5], ["higher", "higher", "lower", "correct"], 0.75),
        ([0, 8, 4, 6, 5], ["out of range", "out of range", "higher", "lower", "correct"], 0.5),
        ([4, 6], ["higher", "lower"], 0.0),
        ([], [], 0.0),
        ([1] * 20 + [5], ["higher"] * 20 + ["correct"], 0.0),
    ],
)
def test_what_guesses_are_answered_and_earn(game: Any, guesses: list[int], answers: list[str], reward: float) -> None:
    assert [game.guess(number) for number in guesses] == answers
    assert game.get_reward() == reward


def test_a_reset_begins_anew(game: Any) -> None:
    game.guess(5)
    assert game.reset(secret=1, largest=15, prompt=[]) == " It is between 1 and 15."
    assert game.get_reward() == 0.0
    assert game.guess(9) == "lower"


def test_the_rows_numbers_are_in_their_ranges(load: Load) -> None:
    rows = load("task").rows(1000, seed=1)
    assert all(1 <= row["secret"] <= row["largest"] for row in rows)
    assert {row["largest"] for row in rows} == {7, 15, 31}


def played(load: Load, demo: Any) -> float:
    """The best reward that the demonstration's guesses earn in a game that answers as it was answered."""
    largest = int(demo.prompt[-1]["content"].rpartition(" ")[2].rstrip("."))
    asked = [call["function"]["arguments"] for turn in demo.turns for call in turn.get("tool_calls", [])]
    answers = [turn["content"] for turn in demo.turns if turn["role"] == "tool"]
    found = []
    for secret in range(1, largest + 1):
        game = load("task").NumberGame()
        game.reset(secret=secret, largest=largest)
        if [game.guess(**arguments) for arguments in asked] == answers:
            found.append(game.get_reward())
    return max(found)


def test_well_played_games_earn_everything_and_flawed_ones_less(load: Load) -> None:
    demonstrations, rng = load("demonstrations"), random.Random(0)
    assert {played(load, demonstrations.correct(rng)) for _ in range(300)} == {1.0}
    rewards = [played(load, demonstrations.mixed(rng)) for _ in range(500)]
    assert {0.0, 0.75, 1.0} <= set(rewards)
    assert 0.5 < sum(rewards) / len(rewards) < 0.8


async def test_a_whole_worker_plays_it(load: Load) -> None:
    """Halving, against the fake server: the first row's number is 5, of 1 to 7."""
    task = load("task").task
    row = task.rows.row_for(0, seed=0, shuffle=False).columns
    assert (row["secret"], row["largest"]) == (5, 7)
    guesses = [f'<tool_call>{{"name": "guess", "arguments": {{"number": {n}}}}}</tool_call>' for n in (4, 6, 5)]
    policy = scripted(TOKENIZER, in_turn([*guesses, "I found it."]))
    done = await roll(replace(task, dataset=[row]), fake(policy))
    assert done.rollouts
    for rollout in done.rollouts:
        assert rollout.reward == 1.0
        assert rollout.messages is not None
        assert b"Guess my number. It is between 1 and 7." in rollout.messages
