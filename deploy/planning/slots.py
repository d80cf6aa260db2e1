"""Simulates a worker: the slots that its episodes generate in, and how many episodes it opens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from slipstream.deploy.planning.rates import EpisodeTimes

# Episodes of a larger group begin in parts of at least this many; the worker's own number.
_PART = 16


@dataclass(eq=False)
class SimulatedGroup:
    worker: SimulatedWorker
    left: int
    flat: bool
    spans: list[tuple[int, float]] = field(default_factory=list)
    kept: set[tuple[int, int]] = field(default_factory=set)  # servers and versions that know its prompt
    unproven: dict[int, int] = field(default_factory=dict)  # newest version by server

    @property
    def tokens(self) -> float:
        return sum(tokens for _, tokens in self.spans)


@dataclass(eq=False)
class SimulatedEpisode:
    group: SimulatedGroup
    times: EpisodeTimes
    turns_left: int
    server: int | None = None
    kept: int | None = None  # version under which its server keeps its last turn


class SimulatedWorker:
    """A worker's slots, as `slipstream.rollout_worker.episodes.capacity` gives them out."""

    def __init__(self, slots: int, max_open: int) -> None:
        self.slots = self.free = self.enough_open = slots
        self.max_open = max(slots, max_open)
        self.open = 0
        self.begun: deque[SimulatedEpisode] = deque()
        self.new: deque[SimulatedEpisode] = deque()
        self.idle_s = self.full_s = 0.0
        self._asks = False
        self._at = 0.0

    def has_slots_for(self, group_size: int) -> bool:
        return not self.begun and not self.new and self.free >= min(group_size, _PART, self.slots)

    def has_room(self, group_size: int) -> bool:
        return self.has_slots_for(group_size) and (self.open == 0 or self.open + group_size <= self.enough_open)

    def note(self, now: float, asks: bool | None = None, full: bool = False) -> None:
        """Count the time since the last note. `asks`: whether it waits for a ticket from now on."""
        idle_s = (now - self._at) * self.free / self.slots
        if self._asks:
            self.idle_s += idle_s
        elif full:
            self.full_s += idle_s
        self._at = now
        if asks is not None:
            self._asks = asks
