"""What one optimiser step trains on: which groups stand, with which tokens and advantages. No I/O.

Every group that arrives ends in exactly one of: standing, or dropped with a reason (I1). Every token of it is
trained, masked or dropped, and counted as such (I4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from learner.algorithm.advantages import grpo
from learner.feed.age_mask import LossWeights, loss_weights
from learner.feed.packing import PackedRow, Sample, pack
from protocol.config import RunConfig
from protocol.messages import Group


@dataclass(frozen=True)
class LeasedGroup:
    """A leased group and the learner's version when the queue took it in."""

    group: Group
    version_at_arrival: int


@dataclass
class Tally:
    """Counts over every group that arrived for a step, also the dropped ones: else the reward would look better or
    worse than it is.

    reward_stds: within each group; in_flight, in_queue: versions that passed until arrival and from then to
    training, of each group's oldest token; staleness_sum, staleness_max: over the tokens that train.
    """

    rewards: list[float] = field(default_factory=list)
    reward_stds: list[float] = field(default_factory=list)
    groups_dropped: Counter[str] = field(default_factory=Counter)
    tokens_sampled: int = 0
    tokens_trained: int = 0
    tokens_masked: Counter[str] = field(default_factory=Counter)
    tokens_dropped: Counter[str] = field(default_factory=Counter)
    two_span_rollouts: int = 0
    in_flight: list[int] = field(default_factory=list)
    in_queue: list[int] = field(default_factory=list)
    staleness_sum: int = 0
    staleness_max: int = 0


@dataclass(frozen=True)
class Batch:
    """One optimiser step's work. `version` is the learner's while it trains; the step makes `version + 1`."""

    step: int
    version: int
    lease_id: str
    ticket_ids: list[str]
    rows: list[PackedRow]
    tally: Tally


@dataclass(frozen=True)
class _Standing:
    group: Group
    weights: LossWeights


class Draft:
    """A step that is being filled. Groups are judged at the version that will train on them."""

    def __init__(self, config: RunConfig, step: int, version: int, lease_id: str) -> None:
        self.step = step
        self.version = version
        self.lease_id = lease_id
        self._config = config
        self._standing: dict[str, _Standing] = {}
        self._consumed = 0
        self._tally = Tally()

    @property
    def ticket_ids(self) -> list[str]:
        return list(self._standing)

    @property
    def wanted(self) -> int:
        """Groups still to lease; 0 when the step is full.

        `zero_variance = "drop"` takes `groups_per_step` groups whatever becomes of them, and as many again should
        none of them be trainable; otherwise dropped groups are replaced.
        """
        size = self._config.learner.groups_per_step
        if self._config.learner.zero_variance != "drop":
            return max(0, size - len(self._standing))
        if self._consumed >= size and self._standing:
            return 0
        return size - self._consumed % size

    def add(self, arrivals: list[LeasedGroup]) -> dict[str, str]:
        """Take groups in; returns the reason for each that is dropped. One that is already here is left alone."""
        dropped = {}
        for arrival in arrivals:
            group = arrival.group
            if group.ticket_id in self._standing:
                continue
            self._consumed += 1
            queue = self._config.queue
            weights = loss_weights(group, self.version, queue.max_staleness, queue.overage)
            self._count(arrival)
            reason = self._reason_to_drop(group, weights)
            if reason is None:
                self._standing[group.ticket_id] = _Standing(group, weights)
                self._count_standing(weights)
            else:
                dropped[group.ticket_id] = reason
                self._tally.groups_dropped[reason] += 1
                self._tally.tokens_dropped[reason] += group.sampled_tokens
        return dropped

    def finish(self) -> Batch:
        """Advantages, and rows within the token budget."""
        samples = [sample for standing in self._standing.values() for sample in self._samples(standing)]
        rows = pack(samples, self._config.learner.token_budget)
        return Batch(self.step, self.version, self.lease_id, self.ticket_ids, rows, self._tally)

    def _reason_to_drop(self, group: Group, weights: LossWeights) -> str | None:
        if not weights.tokens_trained:
            return "overage" if "overage" in weights.masked else "no_tokens"
        if self._config.learner.zero_variance != "keep" and not grpo.has_variance(_rewards(group)):
            return "zero_variance"
        return None

    def _samples(self, standing: _Standing) -> Iterator[Sample]:
        group = standing.group
        values = grpo.group_advantages(_rewards(group), self._config.learner.advantage_epsilon)
        for rollout, weights, advantage in zip(group.rollouts, standing.weights.weights, values, strict=True):
            for segment, weight in zip(rollout.segments, weights, strict=True):
                if weight.any():
                    yield Sample(
                        segment.token_ids, segment.loss_mask, segment.logprobs, weight, float(advantage)
                    ).trimmed()

    def _count(self, arrival: LeasedGroup) -> None:
        group, tally = arrival.group, self._tally
        rewards = _rewards(group)
        tally.rewards.extend(rewards.tolist())
        tally.reward_stds.append(float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0)
        tally.tokens_sampled += group.sampled_tokens
        tally.two_span_rollouts += sum(
            len({span.version for segment in rollout.segments for span in segment.version_spans}) > 1
            for rollout in group.rollouts
        )
        versions = group.versions()
        if versions:
            tally.in_flight.append(arrival.version_at_arrival - versions[0])
            tally.in_queue.append(self.version - arrival.version_at_arrival)

    def _count_standing(self, weights: LossWeights) -> None:
        tally = self._tally
        tally.tokens_trained += weights.tokens_trained
        tally.tokens_masked.update(weights.masked)
        tally.staleness_sum += weights.staleness_sum
        tally.staleness_max = max(tally.staleness_max, weights.staleness_max)


def _rewards(group: Group) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
