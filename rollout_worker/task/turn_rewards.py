"""Rewards given at turns while an episode runs: `slipstream.reward(value)` in a tool, an environment or an agent.

A call finds its episode by the context that it runs in, which threads and coroutines of user code get from the worker.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slipstream.protocol.messages import MAX_METRIC
from slipstream.rollout_worker.task.reward_base import MAX_METRICS, NAME_CHARACTERS
from slipstream.rollout_worker.user_code.values import as_number, encodable

DEFAULT_NAME = "turn"

_SHOWN_CHARACTERS = 60


class TurnRewards:
    """The rewards given at the turns of one rollout. Safe to use from any thread.

    Attributes:
        turns: Number of turns so far.
        fault: The first call that could not be followed; None if there was none.
    """

    def __init__(self) -> None:
        self.turns = 0
        self.fault: str | None = None
        self._lock = threading.Lock()
        self._open = True
        self._given: dict[str, dict[int, float]] = {}

    def add(self, value: Any, name: Any = DEFAULT_NAME, turn: int | None = None) -> None:
        """Add to the reward at a turn. Ignored once the rewards were read, as of a tool that comes back late.

        Args:
            turn: From 0; None for the newest.

        Raises:
            ValueError: The value or the name cannot be kept, or there is no turn yet.
        """
        try:
            number = as_number(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        with self._lock:
            if not self._open:
                return
            place = self.turns - 1 if turn is None else turn
            call = f"slipstream.reward({encodable(repr(value)[:_SHOWN_CHARACTERS])}, {name!r:.200}) at turn {place}"
            if place < 0:
                why = "slipstream.reward(...) came before the policy's first turn: reward what a turn has done"
            elif not abs(number) <= MAX_METRIC:
                why = f"{call}: give a finite number, of at most {MAX_METRIC:g}"
            elif not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS or encodable(name) != name:
                why = f"{call}: name it by a text of 1 to {NAME_CHARACTERS} characters"
            elif name not in self._given and len(self._given) == MAX_METRICS:
                why = f"{call}: it is the {MAX_METRICS + 1}th name, and {MAX_METRICS} are the most"
            else:
                of_name = self._given.setdefault(name, {})
                of_name[place] = of_name.get(place, 0.0) + number
                return
            self.fault = self.fault or why
        raise ValueError(why)

    def close(self) -> dict[str, list[float]]:
        """Return the rewards by name, one number for each turn. Later ones are ignored."""
        with self._lock:
            self._open = False
        return {name: [at.get(turn, 0.0) for turn in range(self.turns)] for name, at in self._given.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call of user code adds rewards: to whose, by role, and at which turn; None for the newest."""

    rewards: Mapping[str, TurnRewards]
    turn: int | None


_place: ContextVar[_Place | None] = ContextVar("slipstream_reward", default=None)


@contextmanager
def rewarding(rewards: Mapping[str, TurnRewards], turn: int | None = None) -> Iterator[None]:
    """Let user code that is called inside the `with` add rewards.

    Args:
        rewards: By role; one with any name where an episode has one role.
        turn: From 0; None for the newest at the time of the call.
    """
    token = _place.set(_Place(rewards, turn))
    try:
        yield
    finally:
        _place.reset(token)


def in_episode() -> bool:
    """Return whether `reward` has an episode to add to."""
    return _place.get() is not None


def reward(value: float, name: str = DEFAULT_NAME, role: str | None = None) -> None:
    """Add a reward at the turn of the policy that has led here: in a tool or an environment's method the turn that
    called it, in an agent the newest turn. Rewards of one turn add up.

    Args:
        value: A finite number, weighted 1 in the rollout's reward.
        name: Name of the reward in metrics and viewers; the class of an environment, or a role, for a part of its own.
        role: The role that gets it, in an agent that plays several.

    Raises:
        RuntimeError: No episode runs here.
        ValueError: The value, the name or the role cannot be kept, or the policy has had no turn yet.
    """
    place = _place.get()
    if place is None:
        raise RuntimeError(
            "slipstream.reward(...): no episode runs here; call it in a tool, in respond or a tool of an environment, "
            'or in an agent, with worker.tool_isolation = "thread", and in no thread of your own'
        )
    roles = [each for each in place.rewards if role in (None, each)]
    if len(roles) != 1:
        known = ", ".join(place.rewards) or "none"
        raise ValueError(f"slipstream.reward(..., role={role!r:.80}): name one of the roles: {known}")
    place.rewards[roles[0]].add(value, name, place.turn)
