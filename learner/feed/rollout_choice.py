"""Which rollouts of a step people get to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Rollout number `rollout` of group number `group` of a step."""

    group: int
    rollout: int


def choose(rewards: Sequence[Sequence[float]], count: int, turn: int) -> list[Place]:
    """`count` places among the rewards of a step's groups: the best, the worst, then one of each other group in turn,
    then what is left. `turn` varies which rollout of a group it is from step to step."""
    longest = max((len(group) for group in rewards), default=0)
    places = [
        Place(number, (nth + turn) % len(group))
        for nth in range(longest)
        for number, group in enumerate(rewards)
        if nth < len(group)
    ]
    by_reward = sorted(places, key=lambda place: -rewards[place.group][place.rollout])
    extremes = dict.fromkeys([*by_reward[:1], *by_reward[-1:]])
    shown = {place.group for place in extremes}
    others = sorted(places, key=lambda place: place.group in shown)
    return list(dict.fromkeys([*extremes, *others]))[:count]
