"""Grafana's dashboard and the alert rules ask for metrics that the queue has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.protocol.status import Evaluation, LearnerStatus
from slipstream.rollout_queue.observe import prometheus
from slipstream.rollout_queue.observe.prometheus import Histograms
from tests.kit.status import status

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
METRIC = re.compile(r"slipstream_\w+")
# Values of labels, where a query names some.
LABELS = re.compile(r"(slipstream_\w+)\{([^}]*)\}")


def known() -> dict[str, set[str]]:
    """Names of the series that a queue shows, each with the labels that it may have."""
    now = status(
        learner=LearnerStatus(reward_mean=0.5, wait_share=0.5, metrics={"entropy": 1.0}),
        worker_wait_share=0.5,
        drops={"expired": 1},
        rejections={"stale": 1},
        evaluations=[Evaluation(1, 1, 1, ended="complete", reward=0.5)],
        served_version=1,
    )
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(prometheus.render(now, Histograms(), {"all": 1}).decode()):
        found.setdefault(family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {**found, "slipstream_server_lag": {"server"}, "slipstream_connections": {"kind"}}


def queries(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from queries(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from queries(value)


def test_the_names_and_labels_of_dashboard_and_rules_are_those_of_the_metrics() -> None:
    dashboard = list(queries(json.loads((FOLDER / "grafana.json").read_text())))
    rules = re.findall(r"expr: (?:\|\n)?((?:.|\n {10})*)", (FOLDER / "alerts.yml").read_text())
    assert (len(dashboard), len(rules)) > (20, 10)
    series = known()
    for query in (*dashboard, *rules):
        for name in METRIC.findall(query):
            assert name in series, query
        for name, labels in LABELS.findall(query):
            asked = set(re.findall(r"(\w+)(?:=|!=|=~|!~)", re.sub(r'"[^"]*"', "", labels)))
            assert asked - {"job"} <= series[name], query


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]]
    cells = [(place["x"] + x, place["y"]) for place in places for x in range(place["w"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_prometheus_takes_the_rules() -> None:
    found = subprocess.run(
        ["promtool", "check", "rules", str(FOLDER / "alerts.yml")], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "12 rules found" in found.stdout
