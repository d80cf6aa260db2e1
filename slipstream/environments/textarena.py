"""Games of TextArena: the policy is the first player, and others answer for the other players."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from slipstream.environments.base import Step, TurnEnvironment, library
from slipstream.protocol.config import ConfigError

_USER = "textarena_environment"
# The games draw from Python's process-wide generator while they are reset, one after the other.
_DRAWING = threading.Lock()
_DRAWING_S = 60.0
# How nltk says, in many lines, which of its data is missing.
_NLTK = re.compile(r"nltk\.download\('(\w+)'\)")
# Moves of other players between two of the policy.
_MAX_MOVES = 1000


def textarena_environment(
    id: str, *, players: int = 1, opponent: Callable[[str], str] | None = None, **options: Any
) -> Callable[[], TextArenaEnvironment]:
    """Return what `Task(environment=...)` takes, for a game of TextArena.

    Args:
        id: The game, such as "GuessTheNumber-v0".
        players: How many play; the policy is the first.
        opponent: Moves for all others: gets what a player sees, returns the move.
        **options: Options of `textarena.make`.

    Raises:
        ConfigError: The library is missing, there is no such game, or others play and nobody moves for them.
    """
    arena = library("textarena", "textarena", _USER)
    named = f"{_USER}({id!r})"
    if players > 1 and opponent is None:
        raise ConfigError(
            f"{named}: players={players}, and nobody moves for the others; give opponent=function, which returns the "
            f"move for what it is shown"
        )
    if opponent is not None and not callable(opponent):
        raise ConfigError(f"{named}: opponent={opponent!r:.80} cannot be called; give a function of what is shown")
    # As the game tells it, without the history, which the conversation has already.
    known = arena.envs.registration.ENV_REGISTRY
    raw = f"{id}-raw" if f"{id}-raw" in known else id
    if raw not in known:
        near = sorted(name for name in known if name.lower().startswith(id[:4].lower()) and name.endswith("-v0"))
        raise ConfigError(f"{named}: there is no such game; {f'there are {near[:8]}' if near else 'see its list'}")
    try:
        with _nltk_silent():
            game = arena.make(raw, **options)
            _reset(game, players, 0)
    except Exception as error:  # whatever a game may raise
        if isinstance(error, LookupError) and (lacks := _NLTK.search(str(error))) is not None:
            raise ConfigError(
                f"{named}: it needs {lacks[1]!r} of nltk's data, which is not here and could not be fetched: python -m "
                f"nltk.downloader {lacks[1]}, or copy the folder nltk_data of a machine that has it, named in NLTK_DATA"
            ) from None
        raise ConfigError(f"{named}: it cannot be played by {players}: {type(error).__name__}: {error}") from None
    return partial(TextArenaEnvironment, raw, players, opponent, dict(options))


class TextArenaEnvironment(TurnEnvironment):
    """Plays one game of TextArena. Made by `textarena_environment`, whose arguments these are."""

    begins_by = "seed"

    def __init__(
        self, id: str, players: int, opponent: Callable[[str], str] | None, options: Mapping[str, Any]
    ) -> None:
        super().__init__(id)
        self._arena = library("textarena", "textarena", _USER)
        self._game = self._arena.make(id, **options)
        self._players = players
        self._opponent = opponent

    def close(self) -> None:
        """Nothing is kept open."""

    def _begin(self, columns: Mapping[str, Any]) -> str:
        seed = columns.get("seed")
        _reset(self._game, self._players, None if seed is None else int(seed))
        step = self._others()
        if step.is_over:
            raise ValueError(f"{self._name}: the game was over before the policy's first move")
        return step.text

    def _step(self, turn: str) -> Step:
        over, _ = self._game.step(turn)
        return self._outcome() if over else self._others()

    def _others(self) -> Step:
        """Let the others move until it is the policy's turn."""
        for _ in range(_MAX_MOVES):
            player, seen = self._game.get_observation()
            text = self._text(player, seen)
            if player == 0:
                return Step(text, 0.0, is_over=False)
            assert self._opponent is not None
            if self._game.step(str(self._opponent(text)))[0]:
                return self._outcome()
        raise ValueError(f"{self._name}: the others moved {_MAX_MOVES} times without a turn of the policy")

    def _text(self, player: int, seen: Any) -> str:
        """Return what a player sees, without its own moves."""
        if isinstance(seen, str):
            return seen
        own = self._arena.core.ObservationType.PLAYER_ACTION
        return "\n".join(str(text) for sender, text, kind in seen if not (sender == player and kind == own))

    def _outcome(self) -> Step:
        rewards, _ = self._game.close()
        return Step("", (rewards or {}).get(0, 0.0), is_over=True)


@contextlib.contextmanager
def _nltk_silent() -> Iterator[None]:
    """Keep back the lines that nltk prints about data that it cannot fetch, because an error here says it in one."""
    try:
        nltk: Any = importlib.import_module("nltk")
    except ImportError:
        yield
        return
    download = nltk.download
    nltk.download = partial(download, print_error_to=io.StringIO())
    try:
        yield
    finally:
        nltk.download = download


def _reset(game: Any, players: int, seed: int | None) -> None:
    """Reset a game while no other is. Raises `TimeoutError` if another's reset does not come back."""
    if not _DRAWING.acquire(timeout=_DRAWING_S):
        raise TimeoutError(f"another game's reset has not come back in {_DRAWING_S:g} s")
    try:
        game.reset(num_players=players, seed=seed)
    finally:
        _DRAWING.release()
