"""Parts that adapters share: the text of a turn is an action, an observation becomes text, rewards are added up.

Invariant: an observation that is no text, a reward that is no finite number and a missing library are each one error
that names the environment and the remedy.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from slipstream.protocol.config import ConfigError
from slipstream.protocol.rollouts import is_counted
from slipstream.rollout_worker.task.reward_base import MAX_METRICS
from slipstream.rollout_worker.task.turn_rewards import in_episode, reward
from slipstream.rollout_worker.user_code.values import as_number

# Numbers that an observation may have to be written as text; more are an image or a tensor.
MAX_NUMBERS = 256

Observe = Callable[[Any], str]


class Step(NamedTuple):
    """What an action led to. `text`: what the policy sees next."""

    text: str
    reward: Any
    is_over: bool


class Score:
    """Adds up the rewards of one episode. `of`: the environment, for errors.

    Attributes:
        total: Their sum, without those that `at_turn` took.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self.total = 0.0
        self.steps = 0

    def add(self, reward: Any) -> None:
        """Add the reward of a step; None is 0.

        Raises:
            ValueError: It is not a finite number.
        """
        self.steps += 1
        try:
            number = 0.0 if reward is None else as_number(reward)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"{self._of}: step {self.steps} gave the reward {reward!r:.100}, which is no finite number; mend its "
                f"reward, or wrap it"
            )
        self.total += number

    def at_turn(self, name: str) -> None:
        """Give the sum so far to the turn that led to it, where an episode runs. `name`: of the reward."""
        if in_episode():
            reward(self.total, name)
            self.total = 0.0


class TurnEnvironment(ABC):
    """An environment whose actions are the policy's turns, as `Task(environment=...)` takes it.

    Args:
        name: Its name, for errors.

    Attributes:
        begins_by: The column of a row without which the episodes of a group begin differently; None where none does it.
    """

    begins_by: str | None = None

    def __init__(self, name: str) -> None:
        self._name = name
        self._score = Score(name)

    def reset(self, **columns: Any) -> str:
        """Begin an episode. The column `seed` of a row, if there is one, lets the episodes of a group begin alike."""
        self._score = Score(self._name)
        return self._begin(columns)

    def respond(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Take the last turn as an action. Returns what it led to; None at the end."""
        step = self._step(last_text(messages))
        self._score.add(step.reward)
        self._score.at_turn(type(self).__name__)
        return None if step.is_over else step.text

    def get_reward(self) -> float:
        """Return the sum of the rewards that no turn has."""
        return self._score.total

    @abstractmethod
    def close(self) -> None:
        """Let go of the environment."""

    @abstractmethod
    def _begin(self, columns: Mapping[str, Any]) -> str:
        """Begin an episode with a row's columns. Returns the first observation."""

    @abstractmethod
    def _step(self, turn: str) -> Step:
        """Act as a turn says."""


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def written(observation: Any, of: str) -> str:
    """Write an observation as text: text as it is, numbers and small collections of them in Python's notation.

    Raises:
        TypeError: It is something else, such as an image.
    """
    if isinstance(observation, str):
        return observation
    try:
        text, numbers = _written(observation)
    except TypeError as error:
        raise TypeError(
            f"{of}: an observation is {error}, which is no text; give observe=function, which returns its text"
        ) from None
    if numbers > MAX_NUMBERS:
        raise TypeError(
            f"{of}: an observation has {numbers} numbers; the policy reads text: give observe=function, which says "
            f"what matters of them"
        )
    return text


def _written(value: Any) -> tuple[str, int]:
    """Return a value as text, and how many numbers it has."""
    if value is None or isinstance(value, str | bool | int | float):
        return (value if isinstance(value, str) else repr(value)), 1
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        size = int(getattr(value, "size", 1))
        return (repr(value.tolist()) if size <= MAX_NUMBERS else ""), size
    if isinstance(value, Mapping):
        parts = [(f"{key}: ", *_written(each)) for key, each in value.items()]
        return ", ".join(f"{name}{text}" for name, text, _ in parts), sum(count for *_, count in parts)
    if isinstance(value, list | tuple):
        entries = [_written(each) for each in value]
        text = ", ".join(entry for entry, _ in entries)
        return (f"[{text}]" if isinstance(value, list) else f"({text})"), sum(count for _, count in entries)
    raise TypeError(f"a {type(value).__name__}")


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that stand next to a reward, at most `MAX_METRICS`, but for those with a name of Slipstream's
    own."""
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name != "reward" and not is_counted(name)
    }
    return dict(list(numbers.items())[:MAX_METRICS])


def library(module: str, package: str, user: str) -> Any:
    """Return a library's module.

    Args:
        module: Its name in an import.
        package: Its name for pip.
        user: What needs it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{user} needs the library {package} ({error}): pip install {package}") from None
