"""Judges the groups that arrive for a step: which of their tokens may train and how old these are (I2). Counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from slipstream.learner.algorithm.drift import MAX_STALENESS
from slipstream.learner.algorithm.step_data import StepRollouts, StepTurns
from slipstream.learner.feed.packing import PackedRow
from slipstream.learner.feed.rollout_metrics import CUT_OFF, RolloutMetrics
from slipstream.protocol import reasons
from slipstream.protocol.messages import Group, Rollout
from slipstream.protocol.versions import within_staleness

Overage = Literal["mask", "drop"]

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LossWeights:
    """Loss weights of one group's tokens. Lists have an array for each segment of the group, in order.

    Attributes:
        weights: float32 [T], 1 where the token trains, else 0.
        staleness: int32 [T], versions between sampling and training; 0 where the token was not sampled.
        fresh: bool [T], whether the version that trains sampled the token, and all of its turn before it.
        masked: Sampled tokens that do not train, by reason (OVERAGE, TRUNCATED, NO_CONTEXT).
        staleness_sum: Over the tokens that train.
        staleness_max: Over the tokens that train.
        tokens_by_staleness: int64, number of tokens that train of each staleness from 0 to `staleness_max`.
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
    """Weigh the tokens of a group for the step that trains `version`.

    A sampled token older than `max_staleness` gets no weight; with `overage="drop"`, one such token takes the weight of
    the whole group. The first token of a segment gets none either, if it was sampled: no token before it predicts it
    (NO_CONTEXT). With `mask_truncated`, no token of a rollout that ran out of tokens gets weight, whatever its age
    (TRUNCATED); its reward still counts in the group.
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
    """Say which tokens `version` sampled from keys and values of its own: servers keep older ones for a turn during
    which an update lands.

    Args:
        versions: int64 [T] of each token, -1 where it was not sampled.
        starts: Where segments begin.

    Returns:
        bool [T].
    """
    is_sampled = versions >= 0
    after_sampled = np.roll(is_sampled, 1)
    after_sampled[starts] = False
    begins = np.maximum.accumulate(np.where(after_sampled, 0, np.arange(len(versions))))  # of each token's turn
    others = np.cumsum(versions != version)
    before = np.where(begins > 0, others[begins - 1], 0)
    fresh: npt.NDArray[np.bool_] = is_sampled & (others == before)
    return fresh


def rewards_of(group: Group) -> npt.NDArray[np.float64]:
    """Return the rewards of a group's rollouts, float64 [G]."""
    return np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)


def step_rollouts(
    groups: Sequence[Group],
    tokens: Sequence[npt.NDArray[np.int64]],
    clip: tuple[float, float] | None = None,
    by_turn: bool = False,
) -> StepRollouts:
    """Make the rollouts of a step.

    Args:
        groups: The groups that train.
        tokens: int64 [G] for each group, how many tokens of each rollout train.
        clip: Bounds of the rewards. Values of single reward functions are not clipped, as in TRL.
        by_turn: Whether advantages are of turns.
    """
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
        roles=_roles(groups),
        turns=step_turns(groups) if by_turn else None,
    )


def _roles(groups: Sequence[Group]) -> npt.NDArray[np.int64] | None:
    """Return the number of each rollout's role among those of its group; None where no group has several."""
    by_role = [group.by_role() for group in groups]
    if all(len(found) == 1 for found in by_role):
        return None
    numbers = [np.zeros(len(group.rollouts), dtype=np.int64) for group in groups]
    for of_group, found in zip(numbers, by_role, strict=True):
        for role, members in enumerate(found.values()):
            of_group[members] = role
    return np.concatenate(numbers)


def step_turns(groups: Sequence[Group]) -> StepTurns:
    """Make the turns of a step. A rollout whose worker did not say where its turns end counts as one turn."""
    counts: list[int] = []
    rewards: list[float] = []
    states: list[int] = []
    for group in groups:
        known: dict[bytes, int] = {}
        for rollout in group.rollouts:
            seen = list(_seen_before_turns(rollout))
            counts.append(len(seen))
            rewards += rollout.turn_rewards or [*[0.0] * (len(seen) - 1), rollout.reward]
            states += [known.setdefault(state, len(known)) for state in seen]
    return StepTurns(np.array(counts), np.array(rewards, dtype=np.float64), np.array(states))


def turn_numbers(rollout: Rollout) -> list[npt.NDArray[np.int64]]:
    """Return the number in the rollout of each token's turn, int64 [T] for each segment; 0 after the last turn."""
    numbers = [np.zeros(len(segment.token_ids), dtype=np.int64) for segment in rollout.segments]
    begins = [0] * len(numbers)
    for turn, (segment, end) in enumerate((of.segment, of.end) for of in rollout.turn_ends or ()):
        numbers[segment][begins[segment] : end] = turn
        begins[segment] = end
    return numbers


def _seen_before_turns(rollout: Rollout) -> Iterator[bytes]:
    """Yield the tokens and images between each turn and the one before it in its segment, or the segment's prompt."""
    if not rollout.turn_ends:
        yield b""
        return
    begins = [0] * len(rollout.segments)
    for of in rollout.turn_ends:
        segment, begin = rollout.segments[of.segment], begins[of.segment]
        start = begin + int(np.argmax(segment.loss_mask[begin : of.end]))
        images = [(place.image, place.start - begin) for place in segment.images if begin <= place.start < start]
        yield segment.token_ids[begin:start].astype("<i4").tobytes() + repr(images or "").encode()
        begins[of.segment] = of.end


def _components(group: Group) -> Iterator[tuple[Mapping[str, float | None], Mapping[str, float]]]:
    """Yield the values of the reward functions for each rollout, and their weights. A worker that names no function
    gave the reward itself."""
    named = any(value is not None for rollout in group.rollouts for value in rollout.reward_components.values())
    for rollout in group.rollouts:
        yield (rollout.reward_components, group.reward_weights) if named else ({"": rollout.reward}, {})


@dataclass(frozen=True)
class JudgedGroup:
    """The counts of a group that arrived. Unlike the group it holds no tokens, so a dropped one needs little memory.

    Attributes:
        in_flight: Versions that passed from the sampling of the oldest token until arrival; None where none was
            sampled.
        in_queue: Versions that passed from arrival to training; None where no token was sampled.
        dropped: The reason; None where the group trains.
    """

    epoch: int
    tokens_sampled: int
    two_span_rollouts: int
    in_flight: int | None
    in_queue: int | None
    dropped: str | None

    @classmethod
    def of(cls, group: Group, version_at_arrival: int, version: int, dropped: str | None) -> Self:
        """Count a group.

        Args:
            version_at_arrival: The learner's version when the queue received it.
            version: The version that would train on it.
            dropped: The reason; None where the group trains.
        """
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
        """Return a copy for training that many versions earlier."""
        return self if self.in_queue is None else replace(self, in_queue=self.in_queue - younger)


@dataclass(frozen=True)
class StepCounts:
    """Counts the rollouts, tokens and rows of one step, a part of its line in `metrics.jsonl`.

    tokens_sampled = tokens_trained + tokens_masked + tokens_dropped.

    Attributes:
        reward_mean: Over every group that arrived, dropped ones too: otherwise rewards would look better or worse than
            they are.
        reward_std: Likewise, of the sample over all rollouts, as TRL's.
        staleness_mean: In versions, over the tokens that train.
        staleness_in_flight: Versions until arrival, a mean over the groups' oldest tokens.
        staleness_in_queue: Versions from arrival to training, likewise.
        tokens_sampled: Of every group that arrived.
        tokens_masked: By reason.
        tokens_dropped: By reason.
        packing_fill: Tokens of the rows, divided by rows times budget.
        tokens_forwarded: Tokens of the rows; tokens that samples share count once.
        tokens_unshared: Their number if nothing were shared.
        tokens_prompt: Of every group that arrived.
        epoch: Whole passes over the data before the newest group.
        tokens_by_staleness: Tokens that train, by `staleness/tokens_<s>`, from 0 to the bound; the last counts older
            ones too.
        metrics: See `RolloutMetrics`.
        task_metrics: The task's own.
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
        """Prompt and sampled tokens of the rollouts that arrived, without tool results."""
        return self.tokens_prompt + self.tokens_sampled


def count_step(
    judged: Sequence[JudgedGroup],
    metrics: RolloutMetrics,
    trained: Sequence[LossWeights],
    rows: Sequence[PackedRow],
    budget: int,
    max_staleness: int = 0,
) -> StepCounts:
    """Count a full step, of which at least one token trains.

    Args:
        judged: Every group that arrived.
        metrics: Those of their rollouts.
        trained: The weights of the groups that train.
        rows: Their rows.
        budget: Tokens that a row may have.
        max_staleness: The bound up to which tokens are counted by staleness.
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
        metrics=metrics.metrics(),
        task_metrics=metrics.task_metrics(),
    )


def _by_staleness(trained: Sequence[LossWeights], most: int) -> dict[str, int]:
    counts = np.zeros(most + 1, dtype=np.int64)
    for weights in trained:
        found = weights.tokens_by_staleness
        np.add.at(counts, np.minimum(np.arange(len(found)), most), found)
    return {f"staleness/tokens_{age}": int(count) for age, count in enumerate(counts)}


def _sums(counts: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    """Add counts up by reason; a count without a reason is left out."""
    sums: Counter[str] = Counter()
    for reason, count in counts:
        if reason is not None:
            sums[reason] += count
    return dict(sums)
