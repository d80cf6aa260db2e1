"""Renders `GET /metrics` for Prometheus: what the status says, so that the two cannot differ, and histograms.

There is no series for each worker, so that the page stays small with thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.messages import ServerState
from protocol.status import Status, WorkerActivity, episodes_at, evaluation_metrics
from rollout_queue.observe.histograms import Histograms

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
    yield _gauge("slipstream_stalled", "1 while the stall alarm is raised", int(status.stall.stalled))
    yield _gauge("slipstream_gave_up", "1 once the run is given up: see the status", int(status.gave_up is not None))
    yield _gauge("slipstream_notices", "notices to people, the newest 64: see the status", len(status.notices))
    yield _gauge("slipstream_train", "the learner's metrics of its newest step", status.learner.metrics, "name")
    yield from _evaluations(status)
    does = Counter(worker.does for worker in status.workers)
    doing = {activity: does[activity] for activity in get_args(WorkerActivity)}
    yield _gauge("slipstream_workers", "workers heard from within the last hour, by what they do", doing, "does")
    yield from _connections(status)
    lags = {server.name: server.lag for server in status.servers if server.lag is not None}
    yield _gauge("slipstream_server_lag", "versions that a server is behind the learner", lags, "server")
    states = {str(state): sum(server.state is state for server in status.servers) for state in ServerState}
    yield _gauge("slipstream_servers", "vLLM servers, by state", states, "state")


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
