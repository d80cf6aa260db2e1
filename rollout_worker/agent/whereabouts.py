"""Where an agent's episode is: with the policy while any of its answers is sampled, else with the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rollout_worker.episodes.capacity import Capacity


class Whereabouts:
    """`policy_s`: seconds by `clock` that any answer was sampled, or waited for its slot. While the agent is at work,
    its tools included, the episode counts as in tools."""

    def __init__(self, capacity: Capacity, clock: Callable[[], float]) -> None:
        self.policy_s = 0.0
        self._capacity = capacity
        self._clock = clock
        self._runs = False
        self._answers = 0
        self._since = 0.0
        self._in_tools = ExitStack()

    @contextmanager
    def agent(self) -> Iterator[None]:
        """While the agent runs."""
        self._runs = True
        self._look()
        try:
            yield
        finally:
            self._runs = False
            self._look()

    @contextmanager
    def policy(self) -> Iterator[None]:
        """While an answer is sampled; several may be at once."""
        if not self._answers:
            self._since = self._clock()
        self._answers += 1
        self._look()
        try:
            yield
        finally:
            self._answers -= 1
            self._look()
            if not self._answers:
                self.policy_s += self._clock() - self._since

    def _look(self) -> None:
        self._in_tools.close()
        if self._runs and not self._answers:
            self._in_tools.enter_context(self._capacity.being("tools"))
