"""Renders `GET /metrics` for Prometheus: what the status says, so that the two cannot differ, and histograms.

There is no series for each worker, so that the page stays small with thousands. An observation of a histogram takes
about a microsecond, whatever was observed before, and may come from any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import LimitingPart, Status, WorkerActivity, episodes_at, evaluation_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


def render(status: Status, histograms: Histograms, store: Mapping[str, int]) -> bytes:
    """Return all metrics as Prometheus text.

    Args:
        store: Bytes of the store's parts, by their names.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status, histograms, store))
    return generate_latest(registry) + generate_latest(histograms.registry)


class _StatusCollector(Collector):
    def __init__(self, status: Status, histograms: Histograms, store: Mapping[str, int]) -> None:
        self._status = status
        self._histograms = histograms
        self._store = store

    def collect(self) -> Iterable[Metric]:
        yield from _gauges(self._status)
        yield from _counters(self._status)
        lag_s = self._histograms.max_loop_lag_s
        yield _gauge("slipstream_loop_lag_max_seconds", "longest lag of the queue's event loop so far", lag_s)
        yield _gauge("slipstream_store_bytes", "size of the store and its write-ahead log", self._store, "part")


def _gauges(status: Status) -> Iterator[Metric]:
    groups, staleness, rates = status.groups, status.staleness, status.rates
    places = {"tickets": groups.tickets, "ready": groups.ready, "leased": groups.leased}
    yield _gauge("slipstream_groups_outstanding", "groups outstanding, by place", places, "place")
    yield _gauge("slipstream_groups_limit", "groups that admission lets be outstanding", groups.limit)
    yield _gauge("slipstream_groups_capacity", "groups that the queue holds at most", groups.capacity_groups)
    yield _gauge("slipstream_bytes", "bytes of ready and leased groups", groups.bytes)
    yield _gauge("slipstream_bytes_kept", "bytes of trained groups, kept for a resume", groups.kept_bytes)
    yield _gauge("slipstream_bytes_capacity", "bytes that the queue holds at most", groups.capacity_bytes)
    yield _gauge("slipstream_depth", "groups outstanding, in optimiser steps", status.depth)
    yield _gauge("slipstream_depth_target", "depth that admission aims at, in optimiser steps", status.depth_target)
    means = {
        "total": staleness.mean,
        "in_flight": staleness.in_flight_mean,
        "in_queue": staleness.in_queue_mean,
    }
    yield _gauge("slipstream_staleness_mean", "versions, over the newest steps, by where they passed", means, "part")
    yield _gauge("slipstream_staleness_max", "versions, over the newest steps", staleness.max)
    yield _gauge("slipstream_staleness_max_ever", "versions, over the whole run", staleness.max_ever)
    yield _gauge("slipstream_staleness_bound", "max_staleness, K", status.max_staleness)
    yield _gauge("slipstream_policy_version", "the learner's version", status.version)
    yield _gauge("slipstream_served_version", "lowest version on a serving server", status.served_version)
    yield _gauge("slipstream_step", "optimiser steps made", status.step)
    yield _gauge("slipstream_reward_mean", "mean reward of the newest step", status.learner.reward_mean)
    yield _gauge(
        "slipstream_learner_wait_share", "share of time that the learner waited for groups", status.learner.wait_share
    )
    yield _gauge(
        "slipstream_worker_wait_share", "share of slots idle because there were no tickets", status.worker_wait_share
    )
    yield _gauge(
        "slipstream_episodes", "open episodes of all workers, by what they do", episodes_at(status.workers), "at"
    )
    yield _gauge("slipstream_slots", "episodes that the workers let generate", sum(w.capacity for w in status.workers))
    full = max((worker.full_share for worker in status.workers), default=None)
    yield _gauge("slipstream_worker_full_share", "share of slots idle as enough is open, of the fullest worker", full)
    per_second = {name: getattr(rates, name) for name in rates.__struct_fields__}
    yield _gauge("slipstream_rate_per_second", "events per second, over the last minute", per_second, "of")
    yield from _scaling(status)
    yield _gauge("slipstream_stalled", "1 while the stall alarm is raised", int(status.stall.stalled))
    yield _gauge("slipstream_gave_up", "1 once the run is given up: see the status", int(status.gave_up is not None))
    yield _gauge("slipstream_notices", "notices to people, the newest 64: see the status", len(status.notices))
    yield _gauge("slipstream_train", "the learner's metrics of its newest step", status.learner.metrics, "name")
    yield from _evaluations(status)
    rows = {} if status.rows is None else {name: getattr(status.rows, name) for name in ("rows", "tried", "teaching")}
    yield _gauge("slipstream_rows", 'rows of the data set, with task.order = "learnable"', rows, "which")
    does = Counter(worker.does for worker in status.workers)
    doing = {activity: does[activity] for activity in get_args(WorkerActivity)}
    yield _gauge("slipstream_workers", "workers heard from within the last hour, by what they do", doing, "does")
    yield from _connections(status)
    lags = {server.name: server.lag for server in status.servers if server.lag is not None}
    yield _gauge("slipstream_server_lag", "versions that a server is behind the learner", lags, "server")
    states = {str(state): sum(server.state is state for server in status.servers) for state in ServerState}
    yield _gauge("slipstream_servers", "vLLM servers, by state", states, "state")


def _scaling(status: Status) -> Iterator[Metric]:
    scaling, limit = status.scaling, status.limit
    limits = {} if limit is None else {part: float(limit.part == part) for part in get_args(LimitingPart)}
    yield _gauge("slipstream_limit", "1 for the part that limits the run, 0 for the others", limits, "part")
    gains = {} if scaling is None else scaling.one_more
    yield _gauge("slipstream_one_more_gain", "share of steps a second that one more would bring", gains, "of")
    servers, workers = (None, None) if scaling is None else (scaling.servers_wanted, scaling.workers_wanted)
    yield _gauge("slipstream_servers_wanted", "vLLM servers that a scaler should keep", servers)
    yield _gauge("slipstream_workers_wanted", "workers that a scaler should keep", workers)


def _connections(status: Status) -> Iterator[Metric]:
    connections = status.connections
    yield _gauge("slipstream_connections", "connections to the queue, by kind", connections.open, "kind")
    yield _gauge("slipstream_connections_limit", "connections that there may be", connections.limits, "kind")
    yield _gauge("slipstream_workers_limit", "workers that the queue takes", connections.max_workers)


def _evaluations(status: Status) -> Iterator[Metric]:
    is_open = [evaluation for evaluation in status.evaluations if evaluation.ended is None]
    yield _gauge("slipstream_evaluations_open", "evaluations that have not ended", len(is_open))
    rows = {
        "done": sum(evaluation.done for evaluation in is_open),
        "failed": sum(evaluation.failed for evaluation in is_open),
        "left": sum((evaluation.rows or 0) - evaluation.done - evaluation.failed for evaluation in is_open),
    }
    yield _gauge("slipstream_evaluation_rows", "rows of evaluations that have not ended", rows, "state")
    newest = next((found for found in reversed(status.evaluations) if found.ended is not None), None)
    of_it = {} if newest is None else evaluation_metrics(newest)
    yield _gauge("slipstream_eval", "figures of the newest evaluation that has ended", of_it, "name")


def _counters(status: Status) -> Iterator[Metric]:
    ledger = status.ledger
    outcomes = {
        "issued": ledger.issued,
        "trained": ledger.trained,
        "dropped": ledger.dropped,
        "reissued": ledger.reissued,
    }
    yield _counter("slipstream_tickets", "tickets, by outcome", outcomes, "outcome")
    yield _counter("slipstream_drops", "tickets dropped, by reason", status.drops, "reason")
    yield _counter("slipstream_rejections", "groups refused, by reason", status.rejections, "reason")
    yield _counter("slipstream_busy", "requests of workers refused for lack of room", status.connections.refused_ever)
    yield _counter("slipstream_tokens_sampled", "sampled tokens of accepted groups", status.tokens_sampled)
    yield _counter("slipstream_tokens_dropped", "sampled tokens of dropped groups", status.tokens_dropped, "reason")


def _gauge(name: str, text: str, value: Mapping[str, float] | float | None, label: str = "") -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label] if label else None)
    for key, number in _samples(value):
        family.add_metric(key, number)
    return family


def _counter(name: str, text: str, value: Mapping[str, float] | float, label: str = "") -> Metric:
    family = CounterMetricFamily(name, text, labels=[label] if label else None)
    for key, number in _samples(value):
        family.add_metric(key, number)
    return family


def _samples(value: Mapping[str, float] | float | None) -> Iterator[tuple[list[str], float]]:
    """Yield labels and number of each sample; none for a value that is not known yet."""
    if isinstance(value, Mapping):
        yield from (([key], number) for key, number in value.items())
    elif value is not None:
        yield [], value
