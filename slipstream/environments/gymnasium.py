"""Environments of Gymnasium: the policy reads an observation and answers with an action."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from slipstream.environments.base import Observe, Step, TurnEnvironment, library, written
from slipstream.protocol.config import ConfigError

# Reads the action from a turn's text. Raises `ValueError`, whose text the policy gets, where there is none.
Act = Callable[[str], Any]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_USER = "gymnasium_environment"


def gymnasium_environment(
    id: str,
    *,
    actions: Sequence[str] = (),
    observe: Observe | None = None,
    act: Act | None = None,
    **options: Any,
) -> Callable[[], GymnasiumEnvironment]:
    """Return what `Task(environment=...)` takes, for an environment of Gymnasium.

    Args:
        id: Its id, such as "Blackjack-v1" or "module:Id-v0".
        actions: Words for the actions 0, 1, ...; by default the policy answers with numbers.
        observe: Writes an observation as text; by default numbers and small arrays are written as they are.
        act: Reads an action from a turn; by default the last word of `actions`, or the last numbers, that it has.
        **options: Options of `gymnasium.make`.

    Raises:
        ConfigError: The library is missing, there is no such environment, or its actions need `act`.
    """
    gymnasium = library("gymnasium", "gymnasium", _USER)
    named = f"{_USER}({id!r})"
    if actions and act is not None:
        raise ConfigError(f"{named}: actions=... and act=... both read an action; give one of them")
    try:
        environment = gymnasium.make(id, **options)
    except Exception as error:  # whatever an environment's constructor may raise
        raise ConfigError(f"{named}: it cannot be made: {type(error).__name__}: {error}") from None
    space = environment.action_space
    environment.close()
    if act is not None:
        return partial(GymnasiumEnvironment, id, act, "", observe, dict(options))
    reading = _Reading(space, gymnasium.spaces, actions, named)
    return partial(GymnasiumEnvironment, id, reading, reading.told, observe, dict(options))


class GymnasiumEnvironment(TurnEnvironment):
    """Plays one environment of Gymnasium. Made by `gymnasium_environment`, whose arguments these are. `told`: how an
    action is written, for the policy."""

    begins_by = "seed"

    def __init__(self, id: str, act: Act, told: str, observe: Observe | None, options: Mapping[str, Any]) -> None:
        super().__init__(id)
        self._environment = library("gymnasium", "gymnasium", _USER).make(id, **options)
        self._act = act
        self._told = told
        self._observe = observe or partial(written, of=id)

    def close(self) -> None:
        self._environment.close()

    def _begin(self, columns: Mapping[str, Any]) -> str:
        seed = columns.get("seed")
        observation, _ = self._environment.reset(seed=None if seed is None else int(seed))
        return "\n".join(filter(None, (self._observe(observation), self._told)))

    def _step(self, turn: str) -> Step:
        try:
            action = self._act(turn)
        except ValueError as error:
            return Step(str(error), 0.0, is_over=False)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        is_over = bool(terminated or truncated)
        return Step("" if is_over else self._observe(observation), reward, is_over)


class _Reading:
    """Reads an action from a turn by the space of actions.

    Raises:
        ConfigError: The space is of another kind.
    """

    def __init__(self, space: Any, spaces: Any, actions: Sequence[str], named: str) -> None:
        self._space = space
        self._start = 0
        self._words: list[str] = []
        self._numbers = 0
        self._is_text = isinstance(space, spaces.Text)
        if isinstance(space, spaces.Discrete):
            self._start = int(space.start)
            if actions and len(actions) != space.n:
                raise ConfigError(f"{named}: actions={list(actions)}, and the environment has {space.n} actions")
            self._words = [str(word) for word in actions]
            last = self._start + int(space.n) - 1
            self.told = (
                f"Answer with one of: {', '.join(self._words)}."
                if self._words
                else f"Answer with a number from {self._start} to {last}."
            )
        elif self._is_text:
            self.told = ""
        elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            self._numbers = 1
            for size in space.shape:
                self._numbers *= int(size)
            self.told = f"Answer with {self._numbers} number{'s' * (self._numbers > 1)}."
        else:
            raise ConfigError(
                f"{named}: its actions are a {type(space).__name__}, which no text is read as; give act=function, "
                f"which returns the action of a turn's text"
            )
        if actions and not self._words:
            raise ConfigError(f"{named}: actions=... names those of a Discrete space, and its is {space}")

    def __call__(self, turn: str) -> Any:
        import numpy

        if self._is_text:
            return turn
        if self._words:
            return self._start + self._word(turn)
        found = _NUMBER.findall(turn)
        if len(found) < max(1, self._numbers):
            raise ValueError(f"There is no action in that. {self.told}")
        if not self._numbers:
            try:
                action: Any = self._space.dtype.type(float(found[-1]))
            except OverflowError:
                raise ValueError(f"There is no such action. {self.told}") from None
        else:
            action = numpy.array([float(number) for number in found[-self._numbers :]], self._space.dtype)
            action = action.reshape(self._space.shape)
        if not self._space.contains(action):
            raise ValueError(f"There is no such action. {self.told}")
        return action

    def _word(self, turn: str) -> int:
        """Return the number of the word of `actions` that stands last in a turn."""
        places = [
            max((match.start() for match in re.finditer(rf"\b{re.escape(word)}\b", turn, re.IGNORECASE)), default=-1)
            for word in self._words
        ]
        if max(places) < 0:
            raise ValueError(f"There is no action in that. {self.told}")
        return places.index(max(places))
