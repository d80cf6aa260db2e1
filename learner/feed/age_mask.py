"""Which tokens of a group may train, and how old they are (I2, I4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.feed.rollout_metrics import CUT_OFF
from protocol import reasons
from protocol.messages import Group
from protocol.staleness import within_staleness

Overage = Literal["mask", "drop"]


@dataclass(frozen=True)
class LossWeights:
    """Loss weights of one group's tokens.

    weights: for each segment of the group, in order, float32 [T]: 1 where the token trains, else 0.
    staleness: likewise, int32 [T]: versions between sampling and training, 0 where the token was not sampled.
    masked: sampled tokens that do not train, by reason (OVERAGE, TRUNCATED, NO_CONTEXT).
    staleness_sum, staleness_max: over the tokens that train.
    """

    weights: list[npt.NDArray[np.float32]]
    staleness: list[npt.NDArray[np.int32]]
    tokens_trained: int
    masked: dict[str, int]
    staleness_sum: int
    staleness_max: int


def loss_weights(
    group: Group, version: int, max_staleness: int, overage: Overage, mask_truncated: bool = False
) -> LossWeights:
    """Weights of `group` for the step that trains `version`.

    A sampled token older than `max_staleness` gets no weight; with `overage="drop"`, one such token takes the weight of
    the whole group. Nor does a sampled first token of a segment get any: no token before it predicts it (NO_CONTEXT).
    With `mask_truncated`, no token of a rollout that ran out of tokens does, whatever its age (TRUNCATED); its reward
    counts in the group all the same.
    """
    rollouts = [(mask_truncated and rollout.finish_reason in CUT_OFF, rollout) for rollout in group.rollouts]
    truncated = sum(rollout.sampled_tokens for cut_off, rollout in rollouts if cut_off)
    versions = [segment.token_versions() for rollout in group.rollouts for segment in rollout.segments]
    kept = [not cut_off for cut_off, rollout in rollouts for _ in rollout.segments]
    trains = [
        keep & (of >= 0) & within_staleness(version, of, max_staleness) for keep, of in zip(kept, versions, strict=True)
    ]
    sampled = group.sampled_tokens
    overaged = sampled - truncated - sum(int(np.count_nonzero(tokens)) for tokens in trains)
    if overage == "drop" and overaged:
        overaged = sampled - truncated
        trains = [np.zeros_like(tokens) for tokens in trains]
    for tokens in trains:
        tokens[:1] = False
    staleness = [np.where(of >= 0, version - of, 0).astype(np.int32) for of in versions]
    ages = [of[tokens] for of, tokens in zip(staleness, trains, strict=True)]
    trained = sum(len(age) for age in ages)
    masked = {
        reasons.OVERAGE: overaged,
        reasons.TRUNCATED: truncated,
        reasons.NO_CONTEXT: sampled - overaged - truncated - trained,
    }
    return LossWeights(
        weights=[tokens.astype(np.float32) for tokens in trains],
        staleness=staleness,
        tokens_trained=trained,
        masked={reason: count for reason, count in masked.items() if count},
        staleness_sum=sum(int(age.sum()) for age in ages),
        staleness_max=max((int(age.max(initial=0)) for age in ages), default=0),
    )
