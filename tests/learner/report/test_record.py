"""The lines of `metrics.jsonl`, as people and other releases read and wrote them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec

from slipstream.learner.report.journal import Journal
from slipstream.learner.report.records import MAX_REPORTED, StepRecord, main_metrics
from tests.learner.report.test_summary import step_record

# Written by the release before TRL's names, objective and all.
OLD_LINE = (
    b'{"step":3,"version":3,"reward_mean":0.5,"reward_std":0.0,"staleness_mean":1,"staleness_max":1,'
    b'"staleness_in_flight":0.0,"staleness_in_queue":0.0,"groups_trained":4,"groups_dropped":{"overage":1},'
    b'"tokens_sampled":120,"tokens_trained":100,"tokens_masked":{},"tokens_dropped":{"overage":20},"rollouts":8,'
    b'"two_span_rollouts":1,"rows":2,"packing_fill":0.9,"loss":0.1,"entropy":1.5,"grad_norm":0.2,'
    b'"learning_rate":0.001,"train_s":0.4,"objective":{"kl":0.01,"wild":null},"wait_s":0.5,"step_s":2.0,"cpu_s":0.01,'
    b'"publish_blocked_ms":3.0}\n'
)


def test_a_run_of_the_release_before_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(OLD_LINE)
    journal = Journal(path, StepRecord, 3)
    assert [(record.step, record.counts.reward_mean, record.times.step_s) for record in journal.records] == [
        (3, 0.5, 2.0)
    ]
    journal.append(step_record(4))
    assert path.read_bytes().startswith(OLD_LINE)
    assert [record.step for record in Journal(path, StepRecord, 4).records] == [3, 4]


def test_a_figure_of_the_task_s_hides_none_of_ours(tmp_path: Path) -> None:
    plain = step_record(1)
    counts = replace(plain.counts, metrics={"completions/mean_length": 3.0}, task_metrics={"reward": 9.0, "depth": 2.0})
    record = replace(plain, counts=counts)
    line = record.flat()
    assert (line["reward"], line["task_metrics/reward"], line["depth"]) == (0.5, 9.0, 2.0)
    path = tmp_path / "metrics.jsonl"
    Journal(path, StepRecord, 0).append(record)
    assert Journal(path, StepRecord, 1).records[0].counts.reward_mean == 0.5


def test_a_figure_of_the_task_s_cannot_be_taken_for_one_of_the_release_before(tmp_path: Path) -> None:
    path, plain = tmp_path / "metrics.jsonl", step_record(1)
    own = {"reward_mean": 9.0, "step_s": 9.0, "objective": 9.0, "counts": 9.0, "metrics": 9.0}
    Journal(path, StepRecord, 0).append(replace(plain, counts=replace(plain.counts, task_metrics=own)))
    record = Journal(path, StepRecord, 1).records[0]
    assert (record.counts.reward_mean, record.times.step_s) == (0.5, 2.0)


def test_the_report_holds_the_main_metrics_that_are_finite_and_is_bounded() -> None:
    parts = {f"rewards/r{i}/mean": 1.0 for i in range(100)}
    line = {**parts, "kl": math.inf, "entropy": None, "rewards/a/std": 1.0, "depth": 1.0, "reward": 0.5, "loss": 0.1}
    report = main_metrics(line)
    assert len(report) == MAX_REPORTED
    assert list(report)[:3] == ["reward", "loss", "rewards/r0/mean"], "the most important first"
    assert {"kl", "entropy", "rewards/a/std", "depth"}.isdisjoint(report)
    assert msgspec.json.encode(report)
