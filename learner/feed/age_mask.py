"""Which tokens of a group may still train, and how old they are (I2, I4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from protocol import reasons
from protocol.messages import Group
from protocol.staleness import within_staleness

Overage = Literal["mask", "drop"]


@dataclass(frozen=True)
class LossWeights:
    """Loss weights of one group's tokens.

    weights: for each segment of the group, in order, float32 [T]: 1 where the token trains, else 0.
    masked: sampled tokens that do not train, by reason (OVERAGE, NO_CONTEXT).
    staleness_sum, staleness_max: over the tokens that train.
    """

    weights: list[npt.NDArray[np.float32]]
    tokens_trained: int
    masked: dict[str, int]
    staleness_sum: int
    staleness_max: int


def loss_weights(group: Group, version: int, max_staleness: int, overage: Overage) -> LossWeights:
    """Weights of `group` for the step that trains `version`.

    A sampled token older than `max_staleness` gets no weight; with `overage="drop"`, one such token takes the weight of
    the whole group. Nor does a sampled first token of a segment get any: no token before it predicts it (NO_CONTEXT).
    """
    segments = [segment for rollout in group.rollouts for segment in rollout.segments]
    versions = [segment.token_versions() for segment in segments]
    trains = [(of >= 0) & within_staleness(version, of, max_staleness) for of in versions]
    sampled = group.sampled_tokens
    overaged = sampled - sum(int(np.count_nonzero(tokens)) for tokens in trains)
    if overage == "drop" and overaged:
        overaged = sampled
        trains = [np.zeros_like(tokens) for tokens in trains]
    for tokens in trains:
        tokens[:1] = False
    ages = [version - of[tokens] for of, tokens in zip(versions, trains, strict=True)]
    trained = sum(len(age) for age in ages)
    masked = {reasons.OVERAGE: overaged, reasons.NO_CONTEXT: sampled - overaged - trained}
    return LossWeights(
        weights=[tokens.astype(np.float32) for tokens in trains],
        tokens_trained=trained,
        masked={reason: count for reason, count in masked.items() if count},
        staleness_sum=sum(int(age.sum()) for age in ages),
        staleness_max=max((int(age.max(initial=0)) for age in ages), default=0),
    )
