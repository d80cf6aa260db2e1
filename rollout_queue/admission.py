"""How many groups may be outstanding: the gate that keeps staleness within its bound before any group is made.

With B groups per step, K = max_staleness, learner version L and s the lowest version that serves, a group issued now
samples its first token at version s or later and is trained after the groups before it. It stays within K if at most
(K + 1 - (L - s)) * B groups are outstanding, itself included. Below that bound the depth d, in steps, follows what the
learner meets: less where groups arrive near the bound, more where it waits. Dropping is only the safety net.
"""

from __future__ import annotations

import msgspec

from protocol.config import RunFile

_DECREASE = 0.8
_INCREASE = 0.25
_WAIT_SHARE = 0.05


class Load(msgspec.Struct, frozen=True):
    """The queue as admission sees it. `served_version` is None while no server serves."""

    outstanding: int
    bytes: int
    version: int
    served_version: int | None
    session: int


class Grant(msgspec.Struct, frozen=True):
    """`count` tickets may be issued now; with 0, `blocked_by` says what they wait for."""

    count: int
    blocked_by: str | None = None


class StepFacts(msgspec.Struct, frozen=True):
    """One optimiser step: staleness of its oldest group, groups dropped for age since the step before, and the share
    of its time that the learner waited for groups."""

    staleness_max: int
    dropped_for_age: int
    wait_share: float


class Admission:
    """Decides on tickets for one run. `depth` is d of DESIGN.md."""

    def __init__(self, config: RunFile) -> None:
        self._groups_per_step = config.learner.groups_per_step
        self._max_staleness = config.queue.max_staleness
        self._capacity_groups = config.queue.capacity_groups
        self._capacity_bytes = config.queue.capacity_bytes
        self._adapts = config.queue.depth == "auto"
        self._deepest = float(self._max_staleness + 1)
        # A step needs B groups at one time: with less than one step outstanding no step would ever be full.
        self.depth = min(2.0, self._deepest) if config.queue.depth == "auto" else max(1.0, config.queue.depth)

    def limit(self, version: int, served_version: int | None) -> int:
        """Groups that may be outstanding while the servers' oldest version is `served_version`."""
        return min(int(self.depth * self._groups_per_step), self._bound(version, served_version))

    def grant(self, load: Load) -> Grant:
        """How many tickets may be issued under `load`."""
        if load.session == 0:
            return Grant(0, "no learner has begun a session")
        if load.served_version is None:
            return Grant(0, "no server is serving")
        if load.outstanding >= self._capacity_groups:
            return Grant(0, f"the queue is full: {load.outstanding} groups, queue.capacity_groups")
        if load.bytes >= self._capacity_bytes:
            return Grant(0, f"the queue is full: {load.bytes} bytes, queue.capacity_bytes")
        limit = self.limit(load.version, load.served_version)
        count = min(limit, self._capacity_groups) - load.outstanding
        if count > 0:
            return Grant(count)
        if self._bound(load.version, load.served_version) <= int(self.depth * self._groups_per_step):
            lag = load.version - load.served_version
            return Grant(
                0, f"the staleness bound: {load.outstanding} groups outstanding, servers {lag} versions behind"
            )
        return Grant(0, f"the depth limit: {load.outstanding} groups outstanding, {self.depth:.2f} steps allowed")

    def observe_step(self, facts: StepFacts) -> None:
        """Adapt the depth to what one step met."""
        if not self._adapts or self._max_staleness == 0:
            return
        if facts.staleness_max >= self._max_staleness or facts.dropped_for_age:
            self.depth = max(1.0, self.depth * _DECREASE)
        elif facts.wait_share > _WAIT_SHARE:
            self.depth = min(self._deepest, self.depth + _INCREASE)

    def _bound(self, version: int, served_version: int | None) -> int:
        lag = max(0, version - served_version) if served_version is not None else 0
        return max(0, (self._max_staleness + 1 - lag) * self._groups_per_step)
