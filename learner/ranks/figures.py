"""Measures what each rank does in a step: seconds, tokens, memory, and its wait for the slowest rank."""

from __future__ import annotations

import resource
import sys
import time

import torch

from slipstream.learner.ranks.team import Team
from slipstream.protocol.messages import RankReport

# macOS reports the greatest memory in bytes, Linux in KiB.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class RankFigures:
    """Measures this rank's part of a step, and gathers all ranks'. With one rank it does nothing.

    A rank is busy until its last backward pass begins, in which ranks exchange gradients, and so wait for each other.
    Ranks that hold parts of the weights exchange them with each layer: there the waits are within the busy time, and
    those that are named are near 0.
    """

    def __init__(self, team: Team, device: torch.device) -> None:
        self._team = team
        self._device = device
        self._began = self._busy_until = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def begin(self) -> None:
        """Note the beginning of a step."""
        if self._team.count == 1:
            return
        self._began = self._busy_until = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._events = _event(), _event()
            self._events[0].record()

    def last_pass(self) -> None:
        """Note that the last backward pass begins. Waits for no device."""
        if self._team.count > 1:
            self._busy_until = time.perf_counter()
            if self._events is not None:
                self._events[1].record()

    def gather(self, tokens: int) -> list[RankReport]:
        """Return the figures of all ranks, on each of them; empty with one rank. All ranks must call it.

        Args:
            tokens: That this rank passed through the model.
        """
        if self._team.count == 1:
            return []
        own = torch.tensor(
            [self._busy_s(), time.perf_counter() - self._began, tokens, self._memory()],
            dtype=torch.float64,
            device=self._device,
        )
        all_ranks = self._team.joined(own).view(self._team.count, -1).tolist()
        slowest = max(busy_s for busy_s, *_ in all_ranks)
        return [
            RankReport(rank, busy_s, slowest - busy_s, step_s, int(tokens), int(memory))
            for rank, (busy_s, step_s, tokens, memory) in enumerate(all_ranks)
        ]

    def _busy_s(self) -> float:
        if self._events is None:
            return self._busy_until - self._began
        began, ended = self._events
        ended.synchronize()  # passed long ago: sums of all passes were read
        return float(began.elapsed_time(ended)) / 1e3

    def _memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
