"""Admission: decides how many groups may be outstanding, so that staleness stays within its bound.

With B groups per step, K = max_staleness, learner version L and s the lowest version that serves, a group issued now
samples its first token at version s or later and is trained after the groups before it. It stays within K if at most
(K + 1 - (L - s)) * B groups are outstanding, itself included. With `zero_variance = "drop"` a group that a step
dropped has used up one of the step's B places, so it counts as outstanding until that step is made.

Below that bound the depth d, groups outstanding in optimiser steps, is as small as the learner's supply allows: more
depth brings no group sooner and only makes groups older. d grows when the learner waited for groups while workers were
refused for depth, and shrinks when a good part of a step's groups came too late to train. Single late groups do not
shrink it: where the lengths of episodes have a heavy tail they come at any depth, and less depth would let the
stragglers block the rest. In simulation (Pareto 1.2, K = 4, B = 16) shrinking at each late group made a run of 300
steps 6 to 18 times longer and still discarded 3 %; this rule stays within 15 % of the time at full depth. Dropping is
only the safety net.
"""

from __future__ import annotations

import msgspec

from slipstream.protocol.config import RunConfig

_DEPTH_FACTOR = 0.8
_DEPTH_STEP = 0.25
_MIN_WAIT_SHARE = 0.05
_MIN_LATE_SHARE = 0.2


class QueueLoad(msgspec.Struct, frozen=True):
    """Inputs of an admission decision.

    Attributes:
        outstanding: Groups ticketed, queued or leased.
        bytes: Bytes of queued and leased groups.
        version: The learner's version.
        served_version: Lowest version on a serving server; None while none serves.
        session: The learner's session, 0 before the first.
    """

    outstanding: int
    bytes: int
    version: int
    served_version: int | None
    session: int


class Grant(msgspec.Struct, frozen=True):
    """How many tickets may be issued now. If none, `blocked_by` says why, and `for_depth` whether d is the reason."""

    count: int
    blocked_by: str | None = None
    for_depth: bool = False


class StepFacts(msgspec.Struct, frozen=True):
    """One optimiser step: groups trained in it, groups dropped for age since the step before it, and the share of its
    time that the learner waited for groups."""

    trained: int
    dropped_for_age: int
    wait_share: float


class Admission:
    """Decides how many tickets may be out. `depth` is d above, in optimiser steps."""

    def __init__(self, config: RunConfig) -> None:
        self._groups_per_step = config.learner.groups_per_step
        self._max_staleness = config.queue.max_staleness
        self._capacity_groups = config.queue.capacity_groups
        self._capacity_bytes = config.queue.capacity_bytes
        self._adapts = config.queue.depth == "auto"
        self._max_depth = float(self._max_staleness + 1)
        # A step needs B groups at once: with less than one step outstanding no step would ever be full.
        self.depth = min(2.0, self._max_depth) if config.queue.depth == "auto" else max(1.0, config.queue.depth)
        self._refused_for_depth = False
        self._drops_use_places = config.learner.zero_variance == "drop"
        self._used: dict[str, int] = {}

    def limit(self, version: int, served_version: int | None) -> int:
        """Return how many groups may be outstanding while the oldest version that serves is `served_version`."""
        return min(self._depth_groups, self._bound(version, served_version))

    def grant(self, load: QueueLoad) -> Grant:
        """Decide how many tickets may be issued under `load`."""
        used = sum(self._used.values())
        outstanding = f"{load.outstanding} groups under way"
        if load.session == 0:
            return Grant(0, "a learner: none has begun a session")
        if load.served_version is None:
            return Grant(0, "a server: none is serving")
        if load.outstanding >= self._capacity_groups:
            return Grant(0, f"room: the queue is full: {outstanding}, queue.capacity_groups = {self._capacity_groups}")
        if load.bytes >= self._capacity_bytes:
            return Grant(
                0, f"room: the queue is full: {load.bytes} bytes, queue.capacity_bytes = {self._capacity_bytes}"
            )
        limit = self.limit(load.version, load.served_version)
        count = min(limit - used, self._capacity_groups) - load.outstanding
        if count > 0:
            return Grant(count)
        if used:
            outstanding += f" and {used} dropped from steps that are not made yet"
        if self._bound(load.version, load.served_version) <= self._depth_groups:
            lag = load.version - load.served_version
            return Grant(0, f"the staleness bound: {outstanding}, the servers {lag} versions behind the learner")
        allowed = f"{limit} allowed = {self.depth:.2f} steps of {self._groups_per_step}"
        return Grant(0, f"the limit of work ahead: {outstanding}, {allowed}", for_depth=True)

    def observe_refusal(self, grant: Grant) -> None:
        """Note that a worker with free slots got no ticket."""
        self._refused_for_depth |= grant.for_depth

    def observe_session(self) -> None:
        """Note that a learner has begun a session: it holds no step yet."""
        self._used.clear()

    def observe_ack(self, lease_id: str, dropped: int, is_step: bool) -> None:
        """Note that the learner dropped groups from the step that `lease_id` is for, or made that step.

        A step takes B groups, and B more as long as all were dropped.
        """
        used = self._used.pop(lease_id, 0) + dropped
        if self._drops_use_places and not is_step and used % self._groups_per_step:
            self._used[lease_id] = used % self._groups_per_step

    def observe_step(self, facts: StepFacts) -> None:
        """Adapt the depth to one optimiser step."""
        refused, self._refused_for_depth = self._refused_for_depth, False
        if not self._adapts or self._max_staleness == 0:
            return
        if facts.dropped_for_age > _MIN_LATE_SHARE * (facts.trained + facts.dropped_for_age):
            self.depth = max(1.0, self.depth * _DEPTH_FACTOR)
        elif refused and facts.wait_share > _MIN_WAIT_SHARE:
            self.depth = min(self._max_depth, self.depth + _DEPTH_STEP)

    @property
    def _depth_groups(self) -> int:
        return int(self.depth * self._groups_per_step)

    def _bound(self, version: int, served_version: int | None) -> int:
        lag = max(0, version - served_version) if served_version is not None else 0
        return max(0, (self._max_staleness + 1 - lag) * self._groups_per_step)
