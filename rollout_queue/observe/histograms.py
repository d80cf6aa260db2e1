"""Histograms of what the queue does, for Prometheus.

An observation takes about a microsecond, whatever was observed before, and may come from any thread.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics

# Seconds of work: from a commit in memory to a disk that hangs.
_WORK_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# Seconds of waiting: a long-poll ends after a minute, a group may wait for hours.
_WAIT_S = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

_BYTES = tuple(float(4**power * 1024) for power in range(9))

_DECISIONS = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)

_VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)

# One series more for each histogram, which says when it was made.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Histograms:
    """The histograms of one queue.

    Attributes:
        registry: Renders them, with the metrics of the process.
        max_loop_lag_s: Longest lag of the event loop so far, seconds.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.max_loop_lag_s = 0.0
        self._put_s = self._made("put_seconds", "from the head of a group's PUT to its answer", _WORK_S)
        self._put_bytes = self._made("put_bytes", "body of a group's PUT", _BYTES)
        self._commit_s = self._made("commit_seconds", "one transaction of the store", _WORK_S)
        self._commit_decisions = self._made("commit_decisions", "decisions in one transaction of the store", _DECISIONS)
        self._poll_s = self._made("poll_seconds", "a worker's wait for tickets, in one request", _WAIT_S)
        self._group_age_s = self._made("group_age_seconds", "of a group at its lease, since it was accepted", _WAIT_S)
        self._staleness = self._made("group_staleness", "versions, of the oldest token of a trained group", _VERSIONS)
        self._loop_lag_s = self._made("loop_lag_seconds", "lateness of the queue's event loop", _WORK_S)
        ProcessCollector(registry=self.registry)

    def _made(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"slipstream_{name}", text, registry=self.registry, buckets=buckets)

    def put_s(self, seconds: float, size: int) -> None:
        """Observe a group's PUT: seconds from its head to its answer, and the bytes of its body."""
        self._put_s.observe(seconds)
        self._put_bytes.observe(size)

    def commit_s(self, seconds: float, decisions: int) -> None:
        """Observe one transaction of the store, and how many decisions went with it."""
        self._commit_s.observe(seconds)
        self._commit_decisions.observe(decisions)

    def poll_s(self, seconds: float) -> None:
        """Observe how long one request for tickets waited."""
        self._poll_s.observe(seconds)

    def group_age_s(self, seconds: float) -> None:
        """Observe how long ago a group that is leased was accepted."""
        self._group_age_s.observe(seconds)

    def staleness(self, versions: int) -> None:
        """Observe the staleness of a trained group."""
        self._staleness.observe(versions)

    def loop_lag(self, seconds: float) -> None:
        """Observe how late the event loop called a timer."""
        self._loop_lag_s.observe(seconds)
        self.max_loop_lag_s = max(self.max_loop_lag_s, seconds)
