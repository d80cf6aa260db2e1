"""`docs/metrics.md` has every name that a line of `metrics.jsonl` may have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from learner.feed.rollout_metrics import RolloutMetrics
from protocol.figures import WHY_FAILED
from tests.kit import group
from tests.learner.test_summary import step_record

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
# A name after the first of a row may leave out the folder that it shares with it.
NAMED = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def made() -> set[str]:
    metrics, with_tools = RolloutMetrics(), group(rewards=(0.0, 1.0))
    for rollout in with_tools.rollouts:
        rollout.tool_calls = 1
        rollout.reward_components = {"accuracy": 0.5}
        counts = ("calls", "failures", "coerced", *(f"failures/{reason}" for reason in WHY_FAILED))
        rollout.metrics = {f"tools/multiply/{count}": 1.0 for count in counts}
    metrics.add(with_tools)
    of_the_task = {"wild"}
    return (set(step_record(1, 0.5).flat()) | set(metrics.ours())) - of_the_task


@pytest.mark.parametrize("name", sorted(made()))
def test_a_metric_is_on_the_page(name: str) -> None:
    general = re.sub(r"(?<=tools/)multiply|(?<=rewards/)accuracy|(?<=finish/)\w+|(?<=failures/)\w+", "<name>", name)
    general = re.sub("(?<=finish/)<name>|(?<=failures/)<name>", "<reason>", general)
    assert {general, general.rpartition("/")[2]} & NAMED, f"{general} is not in docs/metrics.md"
