"""Which tokens of a group may train, and how old they are (I2, I4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.feed.rollout_metrics import CUT_OFF
from protocol import reasons
from protocol.messages import Group
from protocol.versions import within_staleness

Overage = Literal["mask", "drop"]

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LossWeights:
    """Loss weights of one group's tokens.

    weights: for each segment of the group, in order, float32 [T]: 1 where the token trains, else 0.
    staleness: likewise, int32 [T]: versions between sampling and training, 0 where the token was not sampled.
    fresh: likewise, bool [T], true where version itself sampled the token, and all of its turn before it.
    masked: sampled tokens that do not train, by reason (OVERAGE, TRUNCATED, NO_CONTEXT).
    staleness_sum, staleness_max: over the tokens that train; tokens_by_staleness: how many of them there are of each
    staleness, int64, from 0 to `staleness_max`.
    """

    weights: list[npt.NDArray[np.float32]]
    staleness: list[npt.NDArray[np.int32]]
    fresh: list[npt.NDArray[np.bool_]]
    tokens_trained: int
    masked: dict[str, int]
    staleness_sum: int
    staleness_max: int
    tokens_by_staleness: npt.NDArray[np.int64]


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
    segments = [(cut_off, segment) for cut_off, rollout in rollouts for segment in rollout.segments]
    lengths = np.array([len(segment.token_ids) for _, segment in segments], dtype=np.int64)
    ends = lengths.cumsum()
    starts = ends - lengths
    # All of the group's tokens in one array: a group has many segments, most of them short.
    versions = np.concatenate([_NOTHING, *(segment.token_versions() for _, segment in segments)])
    is_sampled = versions >= 0
    staleness = np.where(is_sampled, version - versions, 0).astype(np.int32)
    fresh = _fresh(versions, version, starts[lengths > 0])
    trains = is_sampled & within_staleness(version, versions, max_staleness)
    for (cut_off, _), start, end in zip(segments, starts, ends, strict=True):
        if cut_off:
            trains[start:end] = False
    sampled = group.sampled_tokens
    overaged = sampled - truncated - int(np.count_nonzero(trains))
    if overage == "drop" and overaged:
        overaged = sampled - truncated
        trains[:] = False
    trains[starts[lengths > 0]] = False
    ages = staleness[trains]
    trained = len(ages)
    masked = {
        reasons.OVERAGE: overaged,
        reasons.TRUNCATED: truncated,
        reasons.NO_CONTEXT: sampled - overaged - truncated - trained,
    }
    return LossWeights(
        weights=np.split(trains.astype(np.float32), ends[:-1]),
        staleness=np.split(staleness, ends[:-1]),
        fresh=np.split(fresh, ends[:-1]),
        tokens_trained=trained,
        masked={reason: count for reason, count in masked.items() if count},
        staleness_sum=int(ages.sum()),
        staleness_max=int(ages.max(initial=0)),
        tokens_by_staleness=np.bincount(np.maximum(ages, 0), minlength=1),
    )


def _fresh(versions: npt.NDArray[np.int64], version: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which tokens `version` sampled from keys and values of its own: vLLM keeps those of a turn that an update lands
    in. versions: of each token, -1 where it was not sampled; starts: where segments begin."""
    is_sampled = versions >= 0
    after_sampled = np.roll(is_sampled, 1)
    after_sampled[starts] = False
    begins = np.maximum.accumulate(np.where(after_sampled, 0, np.arange(len(versions))))  # of each token's turn
    others = np.cumsum(versions != version)
    before = np.where(begins > 0, others[begins - 1], 0)
    fresh: npt.NDArray[np.bool_] = is_sampled & (others == before)
    return fresh
