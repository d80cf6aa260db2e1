"""Which tokens of a group may still train, and how old they are (I2, I4).

The staleness of a token is the learner's version at the step that trains on it, minus the version that sampled it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from protocol.messages import Group

Overage = Literal["mask", "drop"]


@dataclass(frozen=True)
class LossWeights:
    """Loss weights of one group's tokens.

    weights: for each rollout, for each of its segments, float32 [T]: 1 where the token trains, else 0.
    masked: sampled tokens that do not train, by reason (`overage`, `no_context`).
    staleness_sum, staleness_max: over the tokens that train.
    """

    weights: list[list[npt.NDArray[np.float32]]]
    tokens_trained: int
    masked: dict[str, int]
    staleness_sum: int
    staleness_max: int


def loss_weights(group: Group, version: int, max_staleness: int, overage: Overage) -> LossWeights:
    """Weights of `group` for the step that trains `version`.

    A sampled token older than `max_staleness` gets no weight; with `overage="drop"` one such token takes the weight
    of the whole group. A segment's first token gets none either (`no_context`): nothing precedes it to predict it.
    """
    ages = [[_ages(segment.token_versions(), version) for segment in rollout.segments] for rollout in group.rollouts]
    flat = np.concatenate([age for rollout in ages for age in rollout] or [np.empty(0, np.int64)])
    limit = max_staleness
    if overage == "drop" and bool((flat > max_staleness).any()):
        limit = -1
    sampled = int(np.count_nonzero(flat >= 0))
    overaged = int(np.count_nonzero(flat > limit))

    weights = [[_young(age, limit).astype(np.float32) for age in rollout] for rollout in ages]
    trained_ages = np.concatenate(
        [age[_young(age, limit)] for rollout in ages for age in rollout] or [np.empty(0, np.int64)]
    )
    masked = {"overage": overaged, "no_context": sampled - overaged - len(trained_ages)}
    return LossWeights(
        weights=weights,
        tokens_trained=len(trained_ages),
        masked={reason: count for reason, count in masked.items() if count},
        staleness_sum=int(trained_ages.sum()),
        staleness_max=int(trained_ages.max(initial=0)),
    )


def _ages(versions: npt.NDArray[np.int64], version: int) -> npt.NDArray[np.int64]:
    """Staleness of each token, int64 [T]; -1 where it was not sampled."""
    return np.where(versions >= 0, version - versions, -1)


def _young(ages: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.bool_]:
    trains = (ages >= 0) & (ages <= limit)
    trains[:1] = False
    return trains
