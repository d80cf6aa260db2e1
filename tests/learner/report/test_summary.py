from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from slipstream import learner
from slipstream.learner.feed.judged_groups import StepCounts
from slipstream.learner.report import summary
from slipstream.learner.report.journal import Journal
from slipstream.learner.report.records import PublicationRecord, StepRecord, StepTimes
from slipstream.learner.training.base import StepMetrics
from slipstream.protocol.messages import LearnerReport, Server
from slipstream.protocol.status import Cause, WorkerStatus
from slipstream.weight_sync.fleet.publications import PublishRecord
from tests.kit.learner import status

REQUIRED = """
steps wall_s worker_cpu_ms_per_episode reward_first10 reward_last10 groups_trained groups_dropped tokens_sampled
tokens_trained staleness_mean staleness_max learner_wait_share worker_wait_share gen_tokens_per_s train_tokens_per_s
sync_count sync_skipped sync_pause_ms_p50 sync_pause_ms_p95 sync_transfer_ms_p50 sync_learner_blocked_ms_p50
probe_max_abs_diff
"""

KEYS = """
step version reward reward_std loss entropy grad_norm learning_rate staleness_mean staleness_max
staleness_in_flight staleness_in_queue groups_trained groups_dropped tokens_sampled tokens_trained tokens_masked
tokens_dropped tokens_prompt num_tokens epoch rollouts two_span_rollouts rows packing_fill tokens_forwarded
tokens_unshared train_tokens_per_s forwarded_per_trained wait_s train_s step_time
cpu_s publish_blocked_ms log_ratio_max sampler/kl_staleness_0 sampler/tokens_staleness_0 kl wild
"""


def step_record(step: int, reward: float = 0.5, staleness: int = 1) -> StepRecord:
    counts = StepCounts(
        reward_mean=reward,
        reward_std=0.0,
        staleness_mean=staleness,
        staleness_max=staleness,
        staleness_in_flight=0.0,
        staleness_in_queue=0.0,
        groups_trained=4,
        groups_dropped={"overage": 1},
        tokens_sampled=120,
        tokens_trained=100,
        tokens_masked={},
        tokens_dropped={"overage": 20},
        rollouts=8,
        two_span_rollouts=1,
        rows=2,
        packing_fill=0.9,
    )
    metrics = StepMetrics(0.1, 1.5, 0.2, 1e-3, train_s=0.4, objective={"kl": 0.01, "wild": None})
    times = StepTimes(wait_s=0.5, step_s=2.0, cpu_s=0.01, publish_blocked_ms=3.0)
    return StepRecord(step=step, version=step, counts=counts, metrics=metrics, times=times)


def typed(record: StepRecord) -> StepRecord:
    """Return what is read back of it: figures with open names stay in the file."""
    return replace(record, metrics=replace(record.metrics, objective={}))


def publication(step: int, pause_s: float) -> PublicationRecord:
    return PublicationRecord(step, PublishRecord(step, 0.001, 0.002, 0.1, pause_s, 1e-5 * step, ["vllm-0"], {}))


def test_summary_of_a_run() -> None:
    steps = [step_record(i, reward=i / 20, staleness=i % 3) for i in range(1, 21)]
    publications = [publication(i, i / 1000) for i in range(1, 12)]
    worker = WorkerStatus("w", "h", 1, 8, 0, 160, 0, 0, 0, 0, 0, 0.2, 3.0, 0.0)
    result = summary.summarise(
        steps,
        publications,
        status(
            workers=[worker],
            servers=[Server("vllm-0", "http://x")],
            drops={"zero_variance": 3},
            tokens_sampled=2600,
            worker_wait_share=0.2,
            worker_cpu_ms_per_episode=3.0,
        ),
    )
    assert (result.steps, result.wall_s, result.step_s_mean) == (20, 40.0, 2.0)
    ends = (result.reward_first10, result.reward_last10, result.reward_over)
    assert ends == (pytest.approx(0.275), pytest.approx(0.775), 10)
    assert (result.tokens_trained, result.tokens_sampled) == (2000, 2600)
    assert (result.train_tokens_per_s, result.gen_tokens_per_s) == (50.0, 65.0)
    assert (result.groups_trained, result.groups_dropped) == (80, {"zero_variance": 3})
    assert (result.staleness_mean, result.staleness_max) == (pytest.approx(1.05), 2)
    assert (result.learner_wait_share, result.worker_wait_share) == (0.25, 0.2)
    assert result.learner_cpu_us_per_trained_token == pytest.approx(100.0)
    assert (result.rollouts, result.rollouts_two_versions) == (160, 20)
    assert (result.sync_count, result.sync_skipped, result.sync_pause_ms_p50) == (11, 0, pytest.approx(6.0))
    assert result.sync_pause_ms_p95 == pytest.approx(10.5)
    assert result.probe_max_abs_diff == pytest.approx(1.1e-4)


@pytest.mark.parametrize(
    ("rewards", "spread", "gradients", "found"),
    [
        ((0.0, 0.0), 0.0, (0.0, 0.0), "the gradient was 0 in all of its 2 steps"),
        ((0.0, 1.0), 0.5, (0.0, 0.0), "the gradient was 0 in all of its 2 steps"),
        ((0.5, 0.5), 0.0, (0.2, 0.2), "all rewards were 0.5 in all of its 2 steps"),
        ((0.5, 0.5), 0.1, (0.2, 0.2), None),
        ((0.0, 1.0), 0.0, (0.0, 0.2), None),
        ((), 0.0, (), None),
    ],
)
def test_a_run_that_taught_nothing_says_so_with_the_cause(
    rewards: tuple[float, ...], spread: float, gradients: tuple[float, ...], found: str | None
) -> None:
    steps = []
    for number, (reward, gradient) in enumerate(zip(rewards, gradients, strict=True), start=1):
        plain = step_record(number, reward)
        counts, metrics = replace(plain.counts, reward_std=spread), replace(plain.metrics, grad_norm=gradient)
        steps.append(replace(plain, counts=counts, metrics=metrics))
    causes = [Cause("tool search", "tool search fails in 9 of its newest 9 calls", "bad", 3.0)]
    result = summary.summarise(steps, [], status(diagnosis=causes), (), 1000.0)
    assert (result.diagnosis, result.ended_at) == (causes, 1000.0)
    if found is None:
        assert result.nothing_learnt is None
    else:
        assert result.nothing_learnt is not None
        assert result.nothing_learnt.startswith(f"nothing was learnt: {found}")
        assert result.nothing_learnt.endswith(". Tool search fails in 9 of its newest 9 calls")
        assert "slipstream rollouts" in (summary.nothing_learnt(steps, []) or "")


@pytest.mark.parametrize(("spread", "learnt"), [(0.0, False), (3e-17, False), (0.5, True)])
def test_equal_sums_of_rewards_that_differ_one_by_one_may_teach(spread: float, learnt: bool) -> None:
    """Advantage `gdpo` compares each reward function by itself."""
    plain = step_record(1, 0.75)
    found = {"rewards/short/std": spread, "rewards/right/std": spread}
    counts = replace(plain.counts, reward_std=0.0, metrics=found)
    step = replace(plain, counts=counts, metrics=replace(plain.metrics, grad_norm=3.0))
    assert (summary.nothing_learnt([step], []) is None) is learnt


def test_summary_has_every_field_that_is_promised_and_survives_an_empty_run(tmp_path: Path) -> None:
    result = summary.summarise([], [], status())
    summary.write(tmp_path, result)
    written = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert set(REQUIRED.split()) <= set(written)
    assert written["staleness_mean"] is None


def test_a_line_holds_the_fields_of_all_parts_side_by_side_and_is_read_back(tmp_path: Path) -> None:
    record, path = step_record(3), tmp_path / "metrics.jsonl"
    Journal(path, StepRecord, 0).append(record)
    line = msgspec.json.decode(path.read_bytes())
    names = [field.name for part in (record.counts, record.metrics, record.times) for field in fields(part)]
    assert len(names) == len(set(names)), "two parts with a field of the same name"
    assert (line["reward"], line["step_time"]) == (record.counts.reward_mean, record.times.step_s), "TRL's names"
    assert (line["kl"], line["wild"]) == (0.01, None)
    assert Journal(path, StepRecord, 3).records == [typed(record)]

    published, path = publication(4, 0.1), tmp_path / "publications.jsonl"
    Journal(path, PublicationRecord, 0).append(published)
    line = msgspec.json.decode(path.read_bytes())
    assert (line["step"], line["version"], line["pause_s"], line["servers_ok"]) == (4, 4, 0.1, ["vllm-0"])
    assert Journal(path, PublicationRecord, 4).records == [published]


def test_a_figure_that_is_not_finite_costs_no_line(tmp_path: Path) -> None:
    """JSON has no infinity; a line that cannot be read back would end the journal there."""
    path, record = tmp_path / "metrics.jsonl", step_record(1)
    wild = replace(record, metrics=replace(record.metrics, objective={"kl": float("inf")}))
    Journal(path, StepRecord, 0).append(wild)
    assert msgspec.json.decode(path.read_bytes())["kl"] is None
    assert Journal(path, StepRecord, 1).records == [typed(wild)]


def test_people_find_the_figures_that_they_read_today() -> None:
    assert set(KEYS.split()) == set(step_record(1).flat())


def test_the_status_page_s_report_is_a_part_of_the_record() -> None:
    assert step_record(3, reward=0.25).report(publishing=2) == LearnerReport(
        step=3,
        reward_mean=0.25,
        wait_s=0.5,
        step_s=2.0,
        tokens_trained=100,
        staleness_mean=1,
        staleness_max=1,
        publishing=2,
        metrics={
            "reward": 0.25,
            "reward_std": 0.0,
            "loss": 0.1,
            "grad_norm": 0.2,
            "learning_rate": 1e-3,
            "entropy": 1.5,
            "kl": 0.01,
            "wait_s": 0.5,
            "train_s": 0.4,
            "publish_blocked_ms": 3.0,
        },
    )


def test_a_journal_forgets_the_time_line_that_a_resume_gave_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Journal(path, StepRecord, 0)
    for step in (1, 2, 3):
        first.append(step_record(step))
    with path.open("ab") as file:
        file.write(b'{"step": 4, "ver')  # cut short by kill -9
    second = Journal(path, StepRecord, 2)
    second.append(step_record(3, reward=0.9))
    assert [record.step for record in second.records] == [1, 2, 3]
    assert Journal(path, StepRecord, 9).records == [typed(record) for record in second.records]


def test_a_journal_that_cannot_be_written_goes_on_and_lacks_no_line_when_it_can(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    said: list[str] = []
    journal = Journal(path, StepRecord, 0, said.append)
    journal.append(step_record(1))
    aside = path.rename(tmp_path / "aside")
    path.mkdir()
    for step in (2, 3):
        journal.append(step_record(step))
    journal.amend(lambda line: {**line, "eval/reward": 0.5})
    path.rmdir()
    aside.rename(path)
    journal.append(step_record(4))
    assert [re.sub(r".*jsonl ", "", text) for text in said] == [
        "cannot be written: Is a directory; the run continues, and the lines wait for room",
        "is written again, with the 3 lines that waited",
    ]
    assert Journal(path, StepRecord, 9).records == [typed(record) for record in journal.records]
    assert b"eval/reward" in path.read_bytes().splitlines()[2]


def test_a_journal_that_was_deleted_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    said: list[str] = []
    journal = Journal(path, StepRecord, 0, said.append)
    journal.append(step_record(1))
    path.unlink()
    journal.append(step_record(2))
    assert said == [f"{path} was deleted: it is written again"]
    assert [record.step for record in Journal(path, StepRecord, 9).records] == [1, 2]


def test_a_journal_keeps_figures_that_only_another_release_knows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Journal(path, StepRecord, 0).append(step_record(1))
    old = path.read_bytes().replace(b'{"step":1', b'{"ratio":1.01,"step":1')
    assert b"ratio" in old
    path.write_bytes(old)
    Journal(path, StepRecord, 1).append(step_record(2))
    assert path.read_bytes().startswith(old)
    assert [record.step for record in Journal(path, StepRecord, 2).records] == [1, 2]


def test_only_the_curve_needs_matplotlib() -> None:
    """A learner without it trains: no module imports it when it is loaded."""
    for file in Path(learner.__file__).parent.rglob("*.py"):
        loaded = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "matplotlib" not in " ".join(ast.unparse(node) for node in loaded), file
