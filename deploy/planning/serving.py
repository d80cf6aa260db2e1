"""Simulates a server: requests that share its speed, and a swap of weights between their tokens."""

from __future__ import annotations

import functools
import heapq
import math
from bisect import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Swaps that a server remembers: no request lasts longer.
MAX_SWAPS = 1000


@dataclass(frozen=True)
class Curve:
    """How long a running request takes for a token.

    Attributes:
        points: Running requests and seconds a token, ascending; on straight lines between them, and beyond the last.
        prefill_s: Seconds in which the server samples nothing, for each token of a prompt that it has not kept.
        sharing: Numbers of servers that were measured on the same cores at one time, and how many times as long each
            took as one by itself.
    """

    points: tuple[tuple[float, float], ...]
    prefill_s: float = 0.0
    sharing: tuple[tuple[int, float], ...] = ()

    @classmethod
    def line(cls, base_s: float, each_s: float) -> Curve:
        """Return the curve `base_s + each_s * running`.

        So n requests sample n / (base_s + each_s n) tokens a second: proportional to n at first, at most 1 / each_s.
        """
        return cls(((0.0, base_s), (1.0, base_s + each_s)))

    def scaled(self, factor: float) -> Curve:
        """Return the curve of a server that takes `factor` times as long for everything."""
        points = tuple((running, token_s * factor) for running, token_s in self.points)
        return Curve(points, self.prefill_s * factor, self.sharing)

    def among(self, servers: int) -> float:
        """Return how many times as long each of some servers takes that share the cores of one. Beyond the most that
        were measured it grows with their number; where none were, it is their number."""
        measured, slower = max((known for known in self.sharing if known[0] <= servers), default=(1, 1.0))
        return slower * servers / measured

    def token_s(self, running: float) -> float:
        return _token_s(self.points, running)

    def tokens_per_s(self, running: float) -> float:
        return running / self.token_s(running)


@functools.cache
def _token_s(points: tuple[tuple[float, float], ...], running: float) -> float:
    if len(points) == 1 or running <= points[0][0]:
        return points[0][1]
    right = min(bisect([x for x, _ in points], running), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (y1 - y0) * (running - x0) / (x1 - x0)


class SimulatedServer(Generic[T]):
    """A server. Running requests advance alike, so that one number, tokens since the start, places all of them.

    Args:
        max_running: Requests that it samples at once; others wait in order.

    Attributes:
        version: Of its weights.
        proven: Newest version of its weights that the queue takes as proven.
        updating: Whether a version is on its way.
        assigned: Episodes that are stuck to it.
        idle_s, running_s: Time without a request, and integral of running requests over time, seconds.
    """

    def __init__(self, curve: Curve, max_running: int, version: int) -> None:
        self.version = self.proven = version
        self.updating = False
        self.assigned = 0
        self.idle_s = self.running_s = 0.0
        self._curve = curve
        self._max_running = max_running
        self._at = self._paused_until = self._advance = 0.0
        self._running: list[tuple[float, int, float, T]] = []
        self._waiting: deque[tuple[float, float, T]] = deque()
        self._swaps: list[tuple[float, int]] = [(0.0, version)]
        self._count = 0

    def add(self, now: float, tokens: float, request: T, prompt: float = 0.0) -> None:
        """Begin a request of `tokens` sampled tokens, or let it wait. `prompt`: tokens that the server has not kept."""
        self.to(now)
        self._waiting.append((tokens, prompt, request))
        self._fill()

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    def next_end(self) -> float:
        """Return when the next request ends if nothing else happens; infinity if none runs."""
        if not self._running:
            return math.inf
        left = self._running[0][0] - self._advance
        begins = self._at if self._at > self._paused_until else self._paused_until
        return begins + left * self._curve.token_s(len(self._running)) if left > 0 else begins

    def end(self, now: float) -> tuple[T, list[tuple[int, float]]]:
        """End the request that is due. Returns it with its tokens by version, newest first."""
        self.to(now)
        until, _, since, request = heapq.heappop(self._running)
        self._advance = max(self._advance, until)
        self._fill()
        return request, list(self._spans(since, until))

    def swap(self, now: float, version: int, pause_s: float) -> None:
        """Take new weights, without sampling for `pause_s` seconds."""
        self.to(now)
        self.version = version
        self._swaps.append((self._advance, version))
        del self._swaps[:-MAX_SWAPS]
        self._paused_until = max(now, self._paused_until) + pause_s

    def to(self, now: float) -> None:
        """Advance to a time."""
        running, passed = len(self._running), now - self._at
        if running:
            sampled = now - max(self._at, self._paused_until)
            if sampled > 0:
                self._advance += sampled / self._curve.token_s(running)
            self.running_s += passed * running
        else:
            self.idle_s += passed
        self._at = now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            tokens, prompt, request = self._waiting.popleft()
            if prompt:
                self._paused_until = max(self._at, self._paused_until) + prompt * self._curve.prefill_s
            self._count += 1
            heapq.heappush(self._running, (self._advance + tokens, self._count, self._advance, request))

    def _spans(self, since: float, until: float) -> Iterator[tuple[int, float]]:
        """Yield versions and tokens of a request, newest first."""
        for begun, version in reversed(self._swaps):
            if begun <= since:
                yield version, until - since
                return
            if begun < until:
                yield version, until - begun
                until = begun
