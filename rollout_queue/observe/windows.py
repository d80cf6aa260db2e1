"""A window of recent rollouts, to be read: what the policy says, also where no step was ever made."""

from __future__ import annotations

from collections import deque

import msgspec

from protocol import codec
from protocol.messages import Group
from protocol.rollouts import RolloutView

GROUPS = 64

ROLLOUTS_OF_A_GROUP = 4

MOST_BYTES = 4 * 1024**2

_MOST_MESSAGES = 256 * 1024  # decoding empty containers takes a hundred times their length

_MOST_VIEW = 64 * 1024

_EVERY_S = 0.5


class Shown(msgspec.Struct, frozen=True):
    """One rollout: its reward, and its `RolloutView` in JSON."""

    reward: float
    json: bytes


def pick_rollouts(group: Group, evaluation: int | None = None) -> list[Shown]:
    """A few rollouts of a group: the worst, the best and some between. `evaluation`: the step of the one that it is of,
    if it is."""
    order = sorted(range(len(group.rollouts)), key=lambda number: group.rollouts[number].reward)
    count = min(ROLLOUTS_OF_A_GROUP, len(order))
    chosen = {order[i * (len(order) - 1) // max(1, count - 1)] for i in range(count)}
    return [_shown(group, number, evaluation) for number in sorted(chosen)]


class RecentRollouts:
    """Those of up to `GROUPS` groups within `MOST_BYTES`: all groups until it is full, then one in `_EVERY_S` seconds,
    since reading each would cost a busy queue too much."""

    def __init__(self) -> None:
        self._taken_at = 0.0
        self._groups: deque[list[Shown]] = deque()
        self._bytes = 0

    def wants(self, now: float) -> bool:
        """Whether the next group is to be picked from and added."""
        return len(self._groups) < GROUPS or now - self._taken_at >= _EVERY_S

    def add(self, shown: list[Shown], now: float) -> None:
        self._taken_at = now
        self._groups.append(shown)
        self._bytes += _size(shown)
        while len(self._groups) > GROUPS or self._bytes > MOST_BYTES:
            self._bytes -= _size(self._groups.popleft())

    def json(self, limit: int, worst: bool) -> bytes:
        """The newest `limit` rollouts as a JSON list, newest first; with `worst` those of the lowest reward, lowest
        first."""
        found = [shown for group in reversed(self._groups) for shown in group]
        if worst:
            found.sort(key=lambda shown: shown.reward)
        return codec.encode_json([msgspec.Raw(shown.json) for shown in found[:limit]])


def _shown(group: Group, number: int, evaluation: int | None) -> Shown:
    rollout = group.rollouts[number]
    readable = rollout.messages is not None and len(rollout.messages) <= _MOST_MESSAGES
    if readable:
        try:
            encoded = codec.encode_json(RolloutView.of(group, number, evaluation))
            if len(encoded) <= _MOST_VIEW:
                return Shown(rollout.reward, encoded)
        except (ValueError, OverflowError, RecursionError):
            pass  # nested too deep to be written, or a number too large: shown without its messages
    return Shown(rollout.reward, codec.encode_json(_without_messages(group, number, evaluation)))


def _without_messages(group: Group, number: int, evaluation: int | None) -> RolloutView:
    silent = msgspec.structs.replace(group.rollouts[number], messages=None)
    view = RolloutView.of(msgspec.structs.replace(group, rollouts=[silent]), 0, evaluation)
    return msgspec.structs.replace(view, number=number)


def _size(group: list[Shown]) -> int:
    return sum(len(shown.json) for shown in group)
