"""The result of a run: `summary.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from learner.report.evaluations import EvaluationRecord
from learner.report.records import PublicationRecord, StepRecord
from protocol.status import Status


class Summary(msgspec.Struct):
    """Over the steps of the surviving time line. wall_s: their time, without the start; rates are per second of it.

    eval_reward_first, eval_reward_last, eval_reward_best: of the evaluations that have a reward, by step.

    sync_skipped: versions that a newer one overtook before a server had taken them.

    Shares are from 0 to 1; `_ms` are milliseconds, percentiles over publications; None where nothing was measured.
    sync_sent_bytes: to all servers, where everything would be `sync_whole_bytes`; sync_share_changed_mean: over the
    publications with deltas.
    """

    steps: int
    wall_s: float
    step_s_mean: float | None
    reward_first10: float | None
    reward_last10: float | None
    evaluations: int
    eval_reward_first: float | None
    eval_reward_last: float | None
    eval_reward_best: float | None
    rollouts: int
    rollouts_two_versions: int
    groups_trained: int
    groups_dropped: dict[str, int]
    tokens_sampled: int
    tokens_trained: int
    gen_tokens_per_s: float | None
    train_tokens_per_s: float | None
    staleness_mean: float | None
    staleness_max: int
    learner_wait_share: float | None
    worker_wait_share: float | None
    worker_cpu_ms_per_episode: float | None
    learner_cpu_us_per_trained_token: float | None
    sync_count: int
    sync_skipped: int
    sync_pause_ms_p50: float | None
    sync_pause_ms_p95: float | None
    sync_transfer_ms_p50: float | None
    sync_learner_blocked_ms_p50: float | None
    sync_sent_bytes: int
    sync_whole_bytes: int
    sync_share_changed_mean: float | None
    probe_max_abs_diff: float | None


def summarise(
    steps: Sequence[StepRecord],
    publications: Sequence[PublicationRecord],
    status: Status,
    evaluations: Sequence[EvaluationRecord] = (),
) -> Summary:
    """`status` gives what only the queue knows: drops of every cause, tokens sampled, the workers' figures."""
    tallies, times = [step.tally for step in steps], [step.times for step in steps]
    rewards = [tally.reward_mean for tally in tallies]
    in_order = sorted(evaluations, key=lambda record: record.step)
    evaluated = [reward for record in in_order if (reward := record.evaluation.reward) is not None]
    published = [record.publication for record in publications]
    pauses_ms = [publication.pause_s * 1e3 for publication in published]
    wall_s = sum(of.step_s for of in times)
    trained = sum(tally.tokens_trained for tally in tallies)
    return Summary(
        steps=len(steps),
        wall_s=wall_s,
        step_s_mean=_ratio(wall_s, len(steps)),
        reward_first10=_mean(rewards[:10]),
        reward_last10=_mean(rewards[-10:]),
        evaluations=len(evaluations),
        eval_reward_first=evaluated[0] if evaluated else None,
        eval_reward_last=evaluated[-1] if evaluated else None,
        eval_reward_best=max(evaluated, default=None),
        rollouts=sum(tally.rollouts for tally in tallies),
        rollouts_two_versions=sum(tally.two_span_rollouts for tally in tallies),
        groups_trained=sum(tally.groups_trained for tally in tallies),
        groups_dropped=dict(status.drops),
        tokens_sampled=status.tokens_sampled,
        tokens_trained=trained,
        gen_tokens_per_s=_ratio(status.tokens_sampled, wall_s),
        train_tokens_per_s=_ratio(trained, wall_s),
        staleness_mean=_ratio(sum(tally.staleness_mean * tally.tokens_trained for tally in tallies), trained),
        staleness_max=max((tally.staleness_max for tally in tallies), default=0),
        learner_wait_share=_ratio(sum(of.wait_s for of in times), wall_s),
        worker_wait_share=status.worker_wait_share,
        worker_cpu_ms_per_episode=status.worker_cpu_ms_per_episode,
        learner_cpu_us_per_trained_token=_ratio(1e6 * sum(of.cpu_s for of in times), trained),
        sync_count=len(published),
        sync_skipped=sum(publication.skipped for publication in published),
        sync_pause_ms_p50=_percentile(pauses_ms, 50),
        sync_pause_ms_p95=_percentile(pauses_ms, 95),
        sync_transfer_ms_p50=_percentile([publication.transfer_s * 1e3 for publication in published], 50),
        sync_learner_blocked_ms_p50=_percentile([publication.blocked_s * 1e3 for publication in published], 50),
        sync_sent_bytes=sum(publication.sent_bytes for publication in published),
        sync_whole_bytes=sum(publication.whole_bytes for publication in published),
        sync_share_changed_mean=_mean(
            [publication.share_changed for publication in published if publication.share_changed is not None]
        ),
        probe_max_abs_diff=max((publication.probe_max_abs_diff for publication in published), default=None),
    )


def write(run_dir: Path, summary: Summary) -> None:
    """`summary.json`"""
    (run_dir / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
