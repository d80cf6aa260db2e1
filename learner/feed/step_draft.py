"""Collects the groups of one optimiser step, with their tokens and advantages. No I/O.

Every group that arrives either stands or is dropped for a reason (I1). Every token of it is trained, masked or dropped,
and counted as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.learner.algorithm import credit
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.feed.images import RowImage, StepImages, unpacked
from slipstream.learner.feed.judged_groups import (
    JudgedGroup,
    LossWeights,
    StepCounts,
    count_step,
    loss_weights,
    rewards_of,
    step_rollouts,
    turn_numbers,
)
from slipstream.learner.feed.packing import PackedRow, Sample, SampledFrom, pack
from slipstream.learner.feed.recorded_experts import RoutedLayers
from slipstream.learner.feed.rollout_metrics import RolloutMetrics, choose
from slipstream.protocol import reasons
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import MAX_METRIC, Group, Rollout, Segment
from slipstream.protocol.rollouts import RolloutView


@dataclass(frozen=True)
class LeasedGroup:
    """A leased group, and the learner's version when the queue received it."""

    group: Group
    version_at_arrival: int


@dataclass(frozen=True)
class SampledTokens:
    """A rollout's tokens.

    Attributes:
        rollout: Its number in the step.
        segments: As they were sampled.
        weights: float32 [T] for each segment, 0 where a token does not train.
        advantages: float32 [T] for each segment; None where all tokens have the rollout's.
    """

    rollout: int
    segments: list[Segment]
    weights: list[npt.NDArray[np.float32]]
    advantages: list[npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True)
class Batch:
    """One optimiser step's work.

    Attributes:
        version: The learner's version while it trains; the step makes `version + 1`.
        samples: Some of its rollouts for people to read, the best first and then the worst.
        sampled: The tokens of the first of them, in the same order; the others are of groups that do not train.
        sequences: What `rows` packs.
        advantages: float32 [S], of each of `rollouts`; [U], of each of their turns, where `learner.credit` is by turn.
    """

    step: int
    version: int
    lease_id: str
    ticket_ids: list[str]
    rows: list[PackedRow]
    rollouts: StepRollouts
    counts: StepCounts
    samples: list[RolloutView] = field(default_factory=list)
    sampled: list[SampledTokens] = field(default_factory=list)
    sequences: list[Sample] = field(default_factory=list)
    advantages: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


@dataclass(frozen=True)
class _Standing:
    group: Group
    weights: LossWeights
    version_at_arrival: int
    images: dict[str, RowImage] = field(default_factory=dict)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Number of tokens that train in each rollout, int64 [G]."""
        of_segments = iter(self.weights.weights)
        counts = [sum(int(np.count_nonzero(next(of_segments))) for _ in of.segments) for of in self.group.rollouts]
        return np.array(counts, dtype=np.int64)


class Draft:
    """A step that is being filled. Groups are judged at the version that will train on them.

    Args:
        branches: Whether the tokens that sequences share stand in a row once.
        routed: Layers to which rows bring the experts that servers recorded; None without `learner.router_replay`.
    """

    def __init__(
        self,
        config: RunConfig,
        step: int,
        version: int,
        lease_id: str,
        branches: bool = True,
        routed: RoutedLayers | None = None,
    ) -> None:
        self.step = step
        self.version = version
        self.lease_id = lease_id
        self._config = config
        self._branches = branches
        self._routed = routed
        self._credit = credit.build(config.learner)
        self._standing: dict[str, _Standing] = {}
        self._judged: dict[str, JudgedGroup] = {}
        self._before: list[JudgedGroup] = []
        self._metrics = RolloutMetrics()
        self._flat: list[RolloutView] = []

    @property
    def ticket_ids(self) -> list[str]:
        """Tickets of the groups that stand."""
        return list(self._standing)

    @property
    def wanted(self) -> int:
        """Groups still to lease; 0 when the step is full.

        Dropped groups are replaced, except with `zero_variance = "drop"`: that takes `groups_per_step` groups, and as
        many again only if none of them can be trained.
        """
        size = self._config.learner.groups_per_step
        if self._config.learner.zero_variance != "drop":
            return max(0, size - len(self._standing))
        if len(self._judged) >= size and self._standing:
            return 0
        return size - len(self._judged) % size

    def add(self, leased: Iterable[LeasedGroup]) -> dict[str, str]:
        """Add groups, except those that are already here. Returns the reason for each that is dropped."""
        dropped = {}
        for item in leased:
            group = item.group
            if group.ticket_id in self._standing:
                continue
            standing = self._judge(item)
            reason = self._reason_to_drop(standing)
            if reason is None and group.images:
                try:
                    standing = replace(standing, images=unpacked(group))
                except ValueError:
                    reason = reasons.BAD_IMAGE
            if reason not in (reasons.REWARD_NOT_FINITE, reasons.METRIC_NOT_FINITE):
                self._metrics.add(group)
            self._judged[group.ticket_id] = JudgedGroup.of(group, item.version_at_arrival, self.version, reason)
            if reason is None:
                self._standing[group.ticket_id] = standing
                continue
            dropped[group.ticket_id] = reason
            if reason == reasons.ZERO_VARIANCE and len(self._flat) < self._samples_wanted:
                self._flat.append(msgspec.structs.replace(RolloutView.of(group, 0), step=self.step))
        return dropped

    def revoke(self, revoked: Mapping[str, str]) -> None:
        """Remove groups that the queue says must not be trained, with the reason of each."""
        for ticket_id, reason in revoked.items():
            if self._standing.pop(ticket_id, None) is not None:
                self._judged[ticket_id] = replace(self._judged[ticket_id], dropped=reason)

    def count(self, left_out: Draft) -> None:
        """Count groups that arrived for this step before and cannot be trained: all of them were dropped."""
        self._before += [*left_out._before, *left_out._judged.values()]
        self._metrics.include(left_out._metrics)
        self._flat = [*left_out._flat, *self._flat]

    def move(self, step: int, version: int) -> dict[str, str]:
        """Make this the draft of another step. Returns the reason for each group that is dropped for it."""
        younger = self.version - version
        self.step, self.version = step, version
        self._flat = [msgspec.structs.replace(view, step=step) for view in self._flat]
        self._judged = {ticket_id: judged.at(younger) for ticket_id, judged in self._judged.items()}
        dropped = {}
        for ticket_id, of in list(self._standing.items()):
            self._standing[ticket_id] = anew = replace(
                self._judge(LeasedGroup(of.group, of.version_at_arrival)), images=of.images
            )
            if (reason := self._reason_to_drop(anew)) is not None:
                dropped[ticket_id] = reason
        self.revoke(dropped)
        return dropped

    def finish(self) -> Batch:
        """Make the batch: rows within the token budget, the step's counts, and rollouts to read."""
        budget = self._config.learner.token_budget
        standing = self._in_order()
        rollouts = self._rollouts(standing)
        rollouts = replace(rollouts, servers=tuple(sorted({name for of in standing for name in of.group.server_names})))
        images = StepImages()
        sequences = [
            sample
            for number, of in enumerate(standing)
            for sample in _sequences(of, number, rollouts, images, self._routed, self._config.teacher.is_on)
        ]
        ranks = self._config.learner.ranks
        rows = pack(sequences, budget, branches=self._branches, ranks=ranks)
        judged = [*self._before, *self._judged.values()]
        weights, bound = [of.weights for of in standing], self._config.queue.max_staleness
        counts = count_step(judged, self._metrics, weights, rows, budget, bound)
        advantages = self._credit(rollouts)
        shown, sampled = self._samples(rollouts, advantages)
        return Batch(
            *(self.step, self.version, self.lease_id, self.ticket_ids, rows, rollouts, counts, shown, sampled),
            sequences=sequences,
            advantages=advantages,
        )

    def _judge(self, item: LeasedGroup) -> _Standing:
        queue, mask_truncated = self._config.queue, self._config.rollout.mask_truncated
        weights = loss_weights(item.group, self.version, queue.max_staleness, queue.overage, mask_truncated)
        return _Standing(item.group, weights, item.version_at_arrival)

    def _in_order(self) -> list[_Standing]:
        """Sort groups by row. Sums of floats depend on their order, and a batch must be the same whatever order its
        groups arrive in."""
        return sorted(self._standing.values(), key=lambda of: of.group.index)

    def _rollouts(self, standing: Sequence[_Standing]) -> StepRollouts:
        clip = self._config.learner.reward_clip
        groups, tokens = [of.group for of in standing], [of.tokens for of in standing]
        return step_rollouts(groups, tokens, clip, self._credit.by_turn)

    def _reason_to_drop(self, standing: _Standing) -> str | None:
        group, weights = standing.group, standing.weights
        if (reason := _not_finite(group)) is not None:
            return reason
        if not weights.tokens_trained:
            masked = (reason for reason in (reasons.OVERAGE, reasons.TRUNCATED) if reason in weights.masked)
            return next(masked, reasons.NO_TOKENS)
        if max(_trained_length(of) for of in weights.weights) > self._config.learner.token_budget:
            return reasons.SEGMENT_TOO_LONG
        if self._config.teacher.is_on:  # it teaches where rewards do not differ, too
            segments = [segment for rollout in group.rollouts for segment in rollout.segments]
            k = self._config.teacher.top_k
            taught = all(
                segment.teacher is not None and (segment.teacher_top.k if segment.teacher_top else 0) == k
                for segment in segments
            )
            return None if taught else reasons.NO_TEACHER
        if self._config.learner.zero_variance != "keep" and self._credit.stays_flat(self._rollouts([standing])):
            return reasons.ZERO_VARIANCE
        return None

    @property
    def _samples_wanted(self) -> int:
        learner = self._config.learner
        shown = learner.show_rollout_every > 0 and self.step % learner.show_rollout_every == 0
        return max(learner.sample_rollouts, int(shown))

    def _samples(
        self, rollouts: StepRollouts, advantages: npt.NDArray[np.float32]
    ) -> tuple[list[RolloutView], list[SampledTokens]]:
        """Pick rollouts of the groups that train, of each role by themselves; where these are few, of groups without
        variance too."""
        standing, count = self._in_order(), self._samples_wanted
        flat = self._flat[: max(0, count - max(2, len(standing)))]
        compared = [(of, members) for of in enumerate(standing) for members in of[1].group.by_role().values()]
        rewards = [rewards_of(of.group)[members].tolist() for (_, of), members in compared]
        places = choose(rewards, count - len(flat), turn=self.step)
        firsts = np.cumsum([0, *(len(of.group.rollouts) for of in standing)])
        views, sampled = [], []
        for place in places:
            (group, of), members = compared[place.group]
            rollout = members[place.rollout]
            number = int(firsts[group] + rollout)
            by_turn = None if rollouts.turns is None else advantages[rollouts.turns.of(np.array([number]))]
            views.append(self._view(of.group, rollout, advantages[number] if by_turn is None else by_turn.mean()))
            before = sum(len(earlier.segments) for earlier in of.group.rollouts[:rollout])
            segments = of.group.rollouts[rollout].segments
            weights = of.weights.weights[before : before + len(segments)]
            of_tokens = None
            if by_turn is not None:
                views[-1].turn_advantages = by_turn.tolist()
                of_tokens = [by_turn[turns] for turns in turn_numbers(of.group.rollouts[rollout])]
            sampled.append(SampledTokens(number, segments, weights, of_tokens))
        return [*views, *flat], sampled

    def _view(self, group: Group, number: int, advantage: np.floating[Any]) -> RolloutView:
        view = RolloutView.of(group, number)
        view.step, view.advantage = self.step, float(advantage)
        view.staleness = self.version - view.versions[0] if view.versions else None
        return view


def _not_finite(group: Group) -> str | None:
    """Return the reason to drop a group whose rewards or metrics are not finite. The queue refuses such groups, but a
    store may hold some from before it did."""
    for rollout in group.rollouts:
        rewards = (rollout.reward, *(value for value in rollout.reward_components.values() if value is not None))
        for reason, values in (
            (reasons.REWARD_NOT_FINITE, rewards),
            (reasons.METRIC_NOT_FINITE, rollout.metrics.values()),
        ):
            if not all(abs(value) <= MAX_METRIC for value in values):
                return reason
    return None


def _of_teacher(segment: Segment) -> dict[str, Any]:
    """Return the teacher's fields of a `Sample`: values by token, 0 where it was not sampled."""
    found: dict[str, npt.NDArray[Any]] = {}
    if segment.teacher is not None:
        found["teacher"] = segment.teacher
    if (top := segment.teacher_top) is not None:
        found["teacher_ids"] = top.ids.reshape(-1, top.k).astype(np.int64)
        found["teacher_top"] = top.logprobs.reshape(-1, top.k)
    spread = {name: np.zeros((len(segment.token_ids), *of.shape[1:]), of.dtype) for name, of in found.items()}
    for name, of in found.items():
        spread[name][segment.loss_mask] = of
    return spread


def _trained_length(weights: npt.NDArray[np.float32]) -> int:
    """Count tokens up to the last one with weight."""
    trained = np.flatnonzero(weights)
    return int(trained[-1]) + 1 if len(trained) else 0


def _sequences(
    standing: _Standing,
    group: int,
    rollouts: StepRollouts,
    images: StepImages,
    routed: RoutedLayers | None,
    is_taught: bool,
) -> Iterator[Sample]:
    """Yield a group's samples. `is_taught`: whether the run has a teacher; groups of one that it had may be left."""
    first = int(np.searchsorted(rollouts.groups, group))
    numbered = [
        (segment, first + place, turns)
        for place, rollout in enumerate(standing.group.rollouts)
        for segment, turns in zip(rollout.segments, _turns_in_step(rollout, first + place, rollouts), strict=True)
    ]
    of = standing.weights
    places = np.array([rollouts.servers.index(name) for name in standing.group.server_names], dtype=np.int32)
    for (segment, rollout, turns), weights, staleness, fresh in zip(
        numbered, of.weights, of.staleness, of.fresh, strict=True
    ):
        if weights.any():
            servers = places[segment.token_servers()] if len(places) else None
            ids, shown = images.token_ids(segment, standing.group, standing.images)
            experts = None if routed is None else routed.of(segment)
            yield Sample(
                *(ids, segment.logprobs, weights, staleness, fresh, rollout, group, servers),
                experts=experts,
                images=shown,
                mask=SampledFrom.of(segment),
                turns=turns,
                **(_of_teacher(segment) if is_taught else {}),
            )


def _turns_in_step(
    rollout: Rollout, number: int, rollouts: StepRollouts
) -> Sequence[npt.NDArray[np.int64]] | Sequence[None]:
    """Return the number in the step of each token's turn, int64 [T] for each segment; None where turns do not count."""
    if rollouts.turns is None:
        return [None] * len(rollout.segments)
    first = rollouts.turns.firsts[number]
    return [first + turns for turns in turn_numbers(rollout)]
