"""How turns are read as actions, and observations written, for environments of Gymnasium."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.environments import gymnasium_environment
from slipstream.environments.base import Score, written
from slipstream.protocol.config import ConfigError

gymnasium = pytest.importorskip("gymnasium")
numpy = pytest.importorskip("numpy")

SPACES = {
    "Three-v0": gymnasium.spaces.Discrete(3, start=1),
    "Two-v0": gymnasium.spaces.MultiDiscrete([2, 5]),
    "Box-v0": gymnasium.spaces.Box(-1.0, 1.0, (2,)),
    "Text-v0": gymnasium.spaces.Text(20),
}


class Echo(gymnasium.Env[Any, Any]):
    """Says what it was given, and a number that the seed decides."""

    observation_space = gymnasium.spaces.Text(100)

    def __init__(self, space: Any) -> None:
        self.action_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return str(self.np_random.integers(10**9)), {}

    def step(self, action: Any) -> Any:
        return f"got {action if isinstance(action, str) else numpy.asarray(action).tolist()}", 1.0, False, False, {}


for name, space in SPACES.items():
    gymnasium.register(id=name, entry_point=Echo, kwargs={"space": space}, disable_env_checker=True)
Unreadable = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2)})
gymnasium.register(id="Unreadable-v1", entry_point=Echo, kwargs={"space": Unreadable}, disable_env_checker=True)


def answer(environment: Any, turn: str) -> str:
    return str(environment.respond([{"role": "assistant", "content": turn}]))


@pytest.mark.parametrize(
    ("id", "options", "turn", "says"),
    [
        ("Three-v0", {}, "1 is low, so 3", "got 3"),
        ("Three-v0", {}, "7", "There is no such action. Answer with a number from 1 to 3."),
        ("Three-v0", {}, "hm", "There is no action in that. Answer with a number from 1 to 3."),
        ("Three-v0", {"actions": ["up", "down", "stay"]}, "Not up: DOWN", "got 2"),
        ("Three-v0", {"actions": ["up", "down", "stay"]}, "uphill", "There is no action in that. Answer with one of"),
        ("Two-v0", {}, "first 1, then 4", "got [1, 4]"),
        ("Two-v0", {}, "4", "There is no action in that. Answer with 2 numbers."),
        ("Box-v0", {}, "0.5 and -0.25", "got [0.5, -0.25]"),
        ("Text-v0", {}, "anything", "got anything"),
        ("Unreadable-v1", {"act": lambda turn: turn[::-1]}, "abc", "got cba"),
    ],
)
def test_a_turn_is_read_as_an_action(id: str, options: dict[str, Any], turn: str, says: str) -> None:
    environment = gymnasium_environment(id, **options)()
    environment.reset()
    assert answer(environment, turn).startswith(says)
    # A turn without an action costs and brings nothing.
    assert environment.get_reward() == float(says.startswith("got"))
    environment.close()


@pytest.mark.parametrize(
    ("id", "options", "says"),
    [
        ("Unreadable-v1", {}, "its actions are a Dict, which no text is read as; give act="),
        ("Three-v0", {"actions": ["up"]}, "the environment has 3 actions"),
        ("Box-v0", {"actions": ["up"]}, "names those of a Discrete space"),
        ("Three-v0", {"actions": ["a", "b", "c"], "act": int}, "give one of them"),
        ("Three-v0", {"no_such_option": 1}, "it cannot be made: TypeError"),
    ],
)
def test_what_cannot_be_played_is_said_at_load(id: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gymnasium_environment(id, **options)


def test_a_seed_lets_episodes_begin_alike_and_the_score_begins_anew() -> None:
    made = gymnasium_environment("Three-v0")
    one, other = made(), made()
    assert one.reset(seed=7, prompt="x") == other.reset(seed=7) != other.reset(seed=8)
    assert "from 1 to 3" in one.reset()
    answer(one, "1")
    answer(one, "2")
    assert one.get_reward() == 2.0
    one.reset()
    assert one.get_reward() == 0.0


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("text", "text"),
        ((14, 10, False), "(14, 10, False)"),
        ([1, 2.5], "[1, 2.5]"),
        ({"a": 1, "b": [2]}, "a: 1, b: [2]"),
        (numpy.array([1.5, 2.0]), "[1.5, 2.0]"),
        (numpy.int64(3), "3"),
        (None, "None"),
    ],
)
def test_numbers_are_written_as_they_are(observation: Any, text: str) -> None:
    assert written(observation, "it") == text


@pytest.mark.parametrize(
    ("observation", "says"),
    [(numpy.zeros((8, 8, 8)), "has 512 numbers"), (object(), "is a object, which is no text"), (b"x", "is a bytes")],
)
def test_what_is_no_text_is_refused_with_the_remedy(observation: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"it: an observation {says}.*observe=function"):
        written(observation, "it")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much"])
def test_a_reward_that_is_no_number_is_refused(reward: Any) -> None:
    score = Score("it")
    score.add(None)
    with pytest.raises(ValueError, match="it: step 2 gave the reward"):
        score.add(reward)
