"""What one optimiser step trains on: which groups stand, with which tokens and advantages. No I/O.

Every group that arrives either stands or is dropped for a reason (I1). Every token of it is trained, masked or dropped,
and counted as such (I4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from learner.algorithm import advantages
from learner.feed.age_mask import LossWeights, loss_weights
from learner.feed.packing import PackedRow, Sample, pack
from learner.feed.tally import JudgedGroup, Tally, rewards_of, tally
from protocol import reasons
from protocol.config import RunConfig
from protocol.messages import Group
from protocol.rollouts import RolloutView


@dataclass(frozen=True)
class LeasedGroup:
    """A leased group and the learner's version when the queue took it in."""

    group: Group
    version_at_arrival: int


@dataclass(frozen=True)
class Batch:
    """One optimiser step's work. `version` is the learner's while it trains; the step makes `version + 1`."""

    step: int
    version: int
    lease_id: str
    ticket_ids: list[str]
    rows: list[PackedRow]
    tally: Tally
    samples: list[RolloutView] = field(default_factory=list)


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
        self._advantage = advantages.build(config.learner)
        self._standing: dict[str, _Standing] = {}
        self._judged: list[JudgedGroup] = []

    @property
    def ticket_ids(self) -> list[str]:
        return list(self._standing)

    @property
    def wanted(self) -> int:
        """Groups still to lease; 0 when the step is full.

        Dropped groups are replaced, but not with `zero_variance = "drop"`: it takes `groups_per_step` groups, and as
        many again only if none of them can be trained.
        """
        size = self._config.learner.groups_per_step
        if self._config.learner.zero_variance != "drop":
            return max(0, size - len(self._standing))
        if len(self._judged) >= size and self._standing:
            return 0
        return size - len(self._judged) % size

    def add(self, leased: Iterable[LeasedGroup]) -> dict[str, str]:
        """Take groups in; returns the reason for each that is dropped. One that is already here is left alone."""
        dropped = {}
        for item in leased:
            group = item.group
            if group.ticket_id in self._standing:
                continue
            queue = self._config.queue
            weights = loss_weights(group, self.version, queue.max_staleness, queue.overage)
            reason = self._reason_to_drop(group, weights)
            self._judged.append(JudgedGroup.of(group, item.version_at_arrival, self.version, reason))
            if reason is None:
                self._standing[group.ticket_id] = _Standing(group, weights)
            else:
                dropped[group.ticket_id] = reason
        return dropped

    def finish(self) -> Batch:
        """Advantages, and rows within the token budget."""
        budget = self._config.learner.token_budget
        rows = pack([sample for standing in self._standing.values() for sample in self._samples(standing)], budget)
        weights = [standing.weights for standing in self._standing.values()]
        counts = tally(self._judged, weights, rows, budget)
        return Batch(self.step, self.version, self.lease_id, self.ticket_ids, rows, counts)

    def _reason_to_drop(self, group: Group, weights: LossWeights) -> str | None:
        if not weights.tokens_trained:
            return reasons.OVERAGE if reasons.OVERAGE in weights.masked else reasons.NO_TOKENS
        if self._config.learner.zero_variance != "keep" and np.ptp(rewards_of(group)) == 0:
            return reasons.ZERO_VARIANCE
        return None

    def _samples(self, standing: _Standing) -> Iterator[Sample]:
        rollouts = standing.group.rollouts
        values = self._advantage(rewards_of(standing.group))
        segments = [
            (segment, float(value))
            for rollout, value in zip(rollouts, values, strict=True)
            for segment in rollout.segments
        ]
        for (segment, advantage), weights in zip(segments, standing.weights.weights, strict=True):
            if weights.any():
                yield Sample(segment.token_ids, segment.loss_mask, segment.logprobs, weights, advantage).trimmed()
