"""The rollouts of a step, as advantages and normalisers see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of a step's groups, S of them; a rollout's number is its place here.

    rewards: float64 [S]; groups: int64 [S], the number of each one's group, ascending; tokens: int64 [S], how many of
    its tokens train, which may be none: its reward is in the group all the same. components: float64 [S, C], what each
    reward function gave, NaN where it gave nothing; reward_weights: float64 [C]. A function whose weight is not the
    same in all groups has a column for each of its weights. servers: names of the vLLM servers that sampled them.
    """

    rewards: Floats
    groups: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    components: Floats
    reward_weights: Floats
    servers: tuple[str, ...] = ()

    @classmethod
    def of(cls, rewards: Floats, groups: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Self:
        """Of one reward function."""
        return cls(rewards, groups, tokens, rewards[:, None], np.ones(1))

    def __len__(self) -> int:
        return len(self.rewards)

    def by_group(self) -> Iterator[npt.NDArray[np.int64]]:
        """The numbers of each group's rollouts."""
        starts = np.flatnonzero(np.diff(self.groups, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(self)], strict=True):
            yield np.arange(start, end)

    def take(self, members: npt.NDArray[np.int64]) -> Self:
        """Some of the rollouts."""
        taken = {name: getattr(self, name)[members] for name in ("rewards", "groups", "tokens", "components")}
        return replace(self, **taken)

    def with_rewards(self, rewards: Floats) -> Self:
        return replace(self, rewards=rewards)
