"""Environments that an OpenEnv server serves, in its own session for each episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from slipstream.environments.base import Observe, Score, last_text, library, written
from slipstream.protocol.config import ConfigError

_USER = "openenv_environment"
_PACKAGE = "openenv-core"
# Columns that `reset` of an OpenEnv environment takes always; others are named by `columns`.
_COLUMNS = ("seed", "episode_id")


def openenv_environment(
    url: str,
    *,
    action: str | Callable[[str], Mapping[str, Any]] | None = None,
    observe: Observe | str | None = None,
    columns: Sequence[str] = _COLUMNS,
    timeout_s: float = 60.0,
    max_mb: float = 4.0,
) -> Callable[[], OpenEnvEnvironment]:
    """Return what `Task(environment=...)` takes, for an environment behind an OpenEnv server.

    Args:
        url: The server's address, such as http://127.0.0.1:8000.
        action: The field of an action that a turn's text is, or a function that returns the fields; by default a turn
            is the JSON object of an action.
        observe: The field of an observation that the policy reads, or a function that returns its text; by default all
            of it.
        columns: Columns of a row that `reset` gets, where the row has them.
        timeout_s: Seconds that the server may take for an answer.
        max_mb: Largest answer in MB; a larger one ends the episode.

    Raises:
        ConfigError: The library is missing, or the address is none.
    """
    library("openenv.core", _PACKAGE, _USER)
    if not str(url).startswith(("http://", "https://", "ws://", "wss://")):
        raise ConfigError(f"{_USER}({url!r}): give the server's address, such as http://127.0.0.1:8000")
    made = OpenEnvEnvironment if "seed" in columns else UnseededOpenEnvEnvironment
    return partial(made, url, action, observe, tuple(columns), timeout_s, max_mb)


class OpenEnvEnvironment:
    """Plays one session of an OpenEnv server. Made by `openenv_environment`, whose arguments these are."""

    begins_by: str | None = "seed"

    def __init__(
        self,
        url: str,
        action: str | Callable[[str], Mapping[str, Any]] | None,
        observe: Observe | str | None,
        columns: Sequence[str],
        timeout_s: float,
        max_mb: float,
    ) -> None:
        client = library("openenv.core.generic_client", _PACKAGE, _USER)
        self._url = url
        self._action = action
        self._observe = observe
        self._columns = columns
        self._timeout_s = timeout_s
        self._client = client.GenericEnvClient(
            url, connect_timeout_s=timeout_s, message_timeout_s=timeout_s, max_message_size_mb=max_mb
        )
        self._score = Score(url)

    async def reset(self, **columns: Any) -> str:
        """Begin an episode: connect, if there is no session yet, and reset it."""
        self._score = Score(self._url)
        given = {name: columns[name] for name in self._columns if name in columns}
        result = await self._asked("reset", self._client.reset(**given))
        return self._text(result.observation)

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Take the last turn as an action. Returns what it led to; None at the end."""
        try:
            action = self._read(last_text(messages))
        except ValueError as error:
            return str(error)
        result = await self._asked("step", self._client.step(action))
        self._score.add(result.reward)
        self._score.at_turn(type(self).__name__)
        return None if result.done else self._text(result.observation)

    def get_reward(self) -> float:
        """Return the sum of the rewards."""
        return self._score.total

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    async def _asked(self, what: str, answer: Any) -> Any:
        """Wait for an answer of the server. Errors say which server, and what was asked."""
        try:
            return await answer
        except TimeoutError:
            raise TimeoutError(
                f"{self._url}: {what} had no answer in {self._timeout_s:g} s; raise timeout_s, or look at the server"
            ) from None
        except Exception as error:  # of the library, of websockets, of the network
            raise RuntimeError(f"{self._url}: {what} failed: {type(error).__name__}: {error}") from None

    def _read(self, turn: str) -> Mapping[str, Any]:
        if callable(self._action):
            return dict(self._action(turn))
        if isinstance(self._action, str):
            return {self._action: turn}
        try:
            fields = json.loads(turn)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError("There is no action in that: answer with the JSON object of an action, and nothing else.")
        return fields

    def _text(self, observation: Any) -> str:
        if callable(self._observe):
            return self._observe(observation)
        if isinstance(self._observe, str):
            if self._observe not in observation:
                raise TypeError(
                    f"{self._url}: an observation has no field {self._observe!r}; it has: {', '.join(observation)}"
                )
            observation = observation[self._observe]
        return written(observation, self._url)


class UnseededOpenEnvEnvironment(OpenEnvEnvironment):
    """Plays one session whose beginning no seed decides."""

    begins_by = None
