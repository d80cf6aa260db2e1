"""`docs/metrics.md` has every name that a line of `metrics.jsonl` may have."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch

from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.corrections import CORRECTIONS
from slipstream.learner.algorithm.drift import drift_metrics as learner_figures
from slipstream.learner.algorithm.drift import drift_sums
from slipstream.learner.algorithm.objectives import OBJECTIVES
from slipstream.learner.feed.judged_groups import _by_staleness
from slipstream.learner.feed.rollout_metrics import RolloutMetrics
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.rollouts import WHY_FAILED
from slipstream.protocol.status import Evaluation, evaluation_metrics
from tests.kit import group
from tests.kit.learner import tokens
from tests.learner.report.test_summary import step_record

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
        rollout.metrics["chat/new_segments"] = 1.0
    metrics.add(with_tools)
    evaluation = Evaluation(5, 5, 4, rows=2, reward=0.5, reward_std=0.1, rewards={"accuracy": 0.5}, best=1.0)
    whole = msgspec.structs.replace(evaluation, mean_length=3.0, clipped=0.0, versions=(5, 6))
    evaluated = set(evaluation_metrics(whole))
    of_the_task = {"wild"}
    drift = learner_figures(drift_sums(torch.zeros(2), torch.tensor([0, 1])))
    stale = _by_staleness([], 1)
    lines = set(step_record(1, 0.5).flat()) | set(metrics.metrics()) | evaluated
    return (lines | {*drift, *stale, "mfu"}) - of_the_task


def of_algorithms() -> set[str]:
    """Return what any algorithm may show."""
    ways: list[dict[str, object]] = [{"objective": name} for name in OBJECTIVES]
    ways += [{"correction": name} for name in CORRECTIONS]
    ways += [{"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5}]
    ways += [{"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_in_reward": True}, {"entropy_coef": 0.1}]
    one = torch.zeros(1)
    seen = tokens([1.0], [0.0]).but(reference=one, top_entropy=one == 0, entropy_weights=one)
    names: set[str] = set()
    for way in ways:
        algorithm = Algorithm(LearnerSection.model_validate(way), longest=8)
        result = algorithm(seen)
        names |= set(algorithm.metrics({name: float(value) for name, value in {**result.sums, **result.peaks}.items()}))
    return names


@pytest.mark.parametrize("name", sorted(made() | of_algorithms()))
def test_a_metric_is_on_the_page(name: str) -> None:
    general = re.sub(r"(?<=tools/)multiply|(?<=rewards/)accuracy|(?<=finish/)\w+|(?<=failures/)\w+", "<name>", name)
    general = re.sub("(?<=finish/)<name>|(?<=failures/)<name>", "<reason>", general)
    general = re.sub(r"@\d+", "@<k>", general)
    general = re.sub(r"(?<=staleness/tokens_)\d+|(?<=kl_staleness_)[1-9]\d*", "<s>", general)
    assert {general, general.rpartition("/")[2]} & NAMED, f"{general} is not in docs/metrics.md"
