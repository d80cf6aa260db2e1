"""What arrived for a step and what became of it, counted.

Which tokens of a group may train, and how old they are (I2, I4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from learner.algorithm.drift import MAX_STALENESS
from learner.algorithm.step_data import StepRollouts
from learner.feed.packing import PackedRow
from learner.feed.rollout_metrics import CUT_OFF, RolloutMetrics
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


@dataclass(frozen=True)
class JudgedGroup:
    """What is counted of a group that arrived; unlike the group, it holds no tokens, so a dropped one costs little.

    in_flight, in_queue: versions that passed until arrival, and from then to training, of the oldest token, None where
    none was sampled; dropped: the reason, None where the group trains.
    """

    epoch: int
    tokens_sampled: int
    two_span_rollouts: int
    in_flight: int | None
    in_queue: int | None
    dropped: str | None

    @classmethod
    def of(cls, group: Group, version_at_arrival: int, version: int, dropped: str | None) -> Self:
        versions = group.versions()
        spans = [
            [span.version for segment in rollout.segments for span in segment.version_spans]
            for rollout in group.rollouts
        ]
        return cls(
            epoch=group.epoch,
            tokens_sampled=group.sampled_tokens,
            two_span_rollouts=sum(len(set(of_rollout)) > 1 for of_rollout in spans),
            in_flight=version_at_arrival - versions[0] if versions else None,
            in_queue=version - version_at_arrival if versions else None,
            dropped=dropped,
        )

    def at(self, younger: int) -> Self:
        """The same, trained so many versions earlier."""
        return self if self.in_queue is None else replace(self, in_queue=self.in_queue - younger)


@dataclass(frozen=True)
class StepCounts:
    """One step's counts, a part of its line in `metrics.jsonl`.

    Rewards are over every group that arrived, dropped ones too: else they would look better or worse than they are;
    `reward_std` is over all of them, of the sample, as TRL's. Staleness in versions, of the tokens that train;
    `_in_flight` and `_in_queue` split it by arrival, as means over the groups' oldest tokens. tokens_sampled, of every
    group that arrived, = tokens_trained + tokens_masked + tokens_dropped, these two by reason; tokens_prompt, of the
    same groups.
    packing_fill: tokens of the rows by rows times budget; tokens_forwarded: tokens of the rows, of which what samples
    share is one; tokens_unshared: what they would be if nothing were shared.
    epoch: whole passes over the data before the newest group.
    tokens_by_staleness: tokens that train, by `staleness/tokens_<s>`, from 0 to the bound; the last counts what is
    staler, too.
    metrics: see `RolloutMetrics`; task_metrics: the task's own.
    """

    reward_mean: float
    reward_std: float
    staleness_mean: float
    staleness_max: int
    staleness_in_flight: float
    staleness_in_queue: float
    groups_trained: int
    groups_dropped: dict[str, int]
    tokens_sampled: int
    tokens_trained: int
    tokens_masked: dict[str, int]
    tokens_dropped: dict[str, int]
    rollouts: int
    two_span_rollouts: int
    rows: int
    packing_fill: float
    tokens_forwarded: int = 0
    tokens_unshared: int = 0
    tokens_prompt: int = 0
    epoch: int = 0
    tokens_by_staleness: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    task_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of the rollouts that arrived, tool results left out."""
        return self.tokens_prompt + self.tokens_sampled


def tally(
    judged: Sequence[JudgedGroup],
    metrics: RolloutMetrics,
    trained: Sequence[LossWeights],
    rows: Sequence[PackedRow],
    budget: int,
    max_staleness: int = 0,
) -> StepCounts:
    """Count a full step: every group that arrived and the metrics of its rollouts, the weights of those that train,
    and their rows. `max_staleness`: the bound, as far as which tokens are counted by staleness.

    At least one token must train.
    """
    tokens_trained = sum(weights.tokens_trained for weights in trained)
    return StepCounts(
        reward_mean=metrics.rewards.mean or 0.0,
        reward_std=metrics.rewards.std or 0.0,
        staleness_mean=sum(weights.staleness_sum for weights in trained) / tokens_trained,
        staleness_max=max(weights.staleness_max for weights in trained),
        staleness_in_flight=fmean(group.in_flight for group in judged if group.in_flight is not None),
        staleness_in_queue=fmean(group.in_queue for group in judged if group.in_queue is not None),
        groups_trained=len(trained),
        groups_dropped=_sums((group.dropped, 1) for group in judged),
        tokens_sampled=sum(group.tokens_sampled for group in judged),
        tokens_trained=tokens_trained,
        tokens_masked=_sums(masked for weights in trained for masked in weights.masked.items()),
        tokens_dropped=_sums((group.dropped, group.tokens_sampled) for group in judged),
        rollouts=metrics.rewards.count,
        two_span_rollouts=sum(group.two_span_rollouts for group in judged),
        rows=len(rows),
        packing_fill=sum(row.tokens for row in rows) / (len(rows) * budget),
        tokens_forwarded=sum(row.tokens for row in rows),
        tokens_unshared=sum(row.raw_tokens for row in rows),
        tokens_prompt=metrics.prompt_tokens,
        epoch=max(group.epoch for group in judged),
        tokens_by_staleness=_by_staleness(trained, min(max_staleness, MAX_STALENESS)),
        metrics=metrics.ours(),
        task_metrics=metrics.the_task_s(),
    )


def _by_staleness(trained: Sequence[LossWeights], most: int) -> dict[str, int]:
    counts = np.zeros(most + 1, dtype=np.int64)
    for weights in trained:
        found = weights.tokens_by_staleness
        np.add.at(counts, np.minimum(np.arange(len(found)), most), found)
    return {f"staleness/tokens_{age}": int(count) for age, count in enumerate(counts)}


def rewards_of(group: Group) -> npt.NDArray[np.float64]:
    """float64 [G]"""
    return np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)


def step_rollouts(
    groups: Sequence[Group], tokens: Sequence[npt.NDArray[np.int64]], clip: tuple[float, float] | None = None
) -> StepRollouts:
    """The rollouts of groups, and how many tokens of each train. Rewards are held within `clip`; what single reward
    functions gave is not, as in TRL."""
    rewards = np.concatenate([rewards_of(group) for group in groups])
    numbers = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    by_column: dict[tuple[str, float], dict[int, float]] = {}
    given = (pair for group in groups for pair in _components(group))
    for number, (components, weights) in enumerate(given):
        for name, value in components.items():
            if value is not None:
                by_column.setdefault((name, weights.get(name, 1.0)), {})[number] = value
    columns = np.full((len(by_column), len(rewards)), np.nan)
    for column, values in zip(columns, by_column.values(), strict=True):
        column[list(values)] = list(values.values())
    return StepRollouts(
        rewards=rewards if clip is None else rewards.clip(*clip),
        groups=numbers,
        tokens=np.concatenate(tokens),
        components=columns.T,
        reward_weights=np.array([weight for _, weight in by_column]),
    )


def _components(group: Group) -> Iterator[tuple[Mapping[str, float | None], Mapping[str, float]]]:
    """What the reward functions gave each rollout, and their weights. A worker that names none gave the reward."""
    named = any(value is not None for rollout in group.rollouts for value in rollout.reward_components.values())
    for rollout in group.rollouts:
        yield (rollout.reward_components, group.reward_weights) if named else ({"": rollout.reward}, {})


def _sums(counts: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    """Counts added up by reason, without those that have none."""
    sums: Counter[str] = Counter()
    for reason, count in counts:
        if reason is not None:
            sums[reason] += count
    return dict(sums)
