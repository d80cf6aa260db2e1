"""Defines the lines of the run's journals: `metrics.jsonl`, `publications.jsonl` and `evaluations.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

import msgspec

from slipstream.learner.feed.judged_groups import StepCounts
from slipstream.learner.report.journal import Record
from slipstream.learner.training.base import StepMetrics
from slipstream.protocol.messages import LearnerReport, RankReport
from slipstream.protocol.status import EVAL, EVAL_STEP, Evaluation
from slipstream.weight_sync.fleet.publications import PublishRecord

FILE_NAME = "evaluations.jsonl"

# Key in a line of `metrics.jsonl`: metrics of the evaluations that ended by the same step and are not the newest, one
# mapping for each, in the order of their steps.
EARLIER = "eval/earlier"

# Metrics of a step on the status page and on `/metrics`, by their names in `metrics.jsonl`; the most important first.
MAIN_METRICS = (
    *("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"),
    *(
        "loss",
        "grad_norm",
        "learning_rate",
        "entropy",
        "kl",
        "kl_reference",
        "teacher/kl",
        "sampler/kl_staleness_*",
        "clip_ratio/*",
    ),
    *("sampler/distance/*", "ess", "sampler/ratio_p*", "mfu", "wait_s", "train_s", "publish_blocked_ms"),
    *("weight_sync/pause_s", "weight_sync/transfer_s", "weight_sync/sent_bytes", "weight_sync/share_changed"),
    "weight_sync/generation_share",
    *("tools/call_frequency", "tools/failure_frequency", "rewards/*/mean", "tools/*_frequency", "tools/*/call_s"),
)

MAX_REPORTED = 64


@dataclass(frozen=True)
class StepTimes:
    """Times of a step.

    Attributes:
        wait_s: Seconds of `step_s` spent waiting for groups.
        step_s: Seconds from one acknowledgement to the next.
        cpu_s: CPU seconds of the whole process in the same time.
        publish_blocked_ms: Milliseconds of `step_s` spent handing over the version before.
    """

    wait_s: float
    step_s: float
    cpu_s: float
    publish_blocked_ms: float


@dataclass(frozen=True)
class StepRecord(Record):
    """An optimiser step, which made `version`. Its line has the names of TRL 1.16 where the meaning is the same.

    `evaluations` and `weight_sync` are for people, so they are not read back.

    Attributes:
        num_tokens: Prompt and sampled tokens of all groups that arrived, from the start of the run to this step.
        evaluations: Metrics of each evaluation that ended since the step before; `eval/step` names its step.
        weight_sync: Metrics of the newest publication that ended since the step before.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "reward_mean": "reward",
        "step_s": "step_time",
        "sampler_kl_staleness_0": "sampler/kl_staleness_0",
        "sampler_tokens_staleness_0": "sampler/tokens_staleness_0",
    }
    SPREAD: ClassVar[Sequence[str]] = (
        *("metrics", "tokens_by_staleness", "objective", "beside"),
        *("weight_sync", "task_metrics"),
    )

    version: int
    counts: StepCounts
    metrics: StepMetrics
    times: StepTimes
    num_tokens: int = 0
    evaluations: Sequence[Mapping[str, float]] = ()
    weight_sync: Mapping[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        line = super().flat()
        return beside(line, line.pop("evaluations"))

    def derived(self) -> dict[str, Any]:
        trained, step_s = self.counts.tokens_trained, self.times.step_s
        return {
            "train_tokens_per_s": trained / step_s if step_s else None,
            "forwarded_per_trained": self.counts.tokens_forwarded / trained if trained else None,
        }

    def report(self, publishing: int | None, ranks: Sequence[RankReport] = ()) -> LearnerReport:
        """Make the report of the step for the status page.

        Args:
            publishing: The version on its way to the servers.
            ranks: Each of several ranks.
        """
        return LearnerReport(
            step=self.step,
            reward_mean=self.counts.reward_mean,
            wait_s=self.times.wait_s,
            step_s=self.times.step_s,
            tokens_trained=self.counts.tokens_trained,
            staleness_mean=self.counts.staleness_mean,
            staleness_max=self.counts.staleness_max,
            publishing=publishing,
            metrics=main_metrics(self.flat()),
            ranks=list(ranks),
        )


def main_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Pick the main metrics of a step's line that are finite."""
    names = [name for pattern in MAIN_METRICS for name in line if fnmatchcase(name, pattern)]
    finite = {name: line[name] for name in names if line[name] is not None and math.isfinite(line[name])}
    return dict(list(finite.items())[:MAX_REPORTED])


def published(publication: PublishRecord) -> dict[str, float]:
    """Return a publication's metrics for a step's line."""
    metrics = {
        "transfer_s": publication.transfer_s,
        "pause_s": publication.pause_s,
        "probe_max_abs_diff": publication.probe_max_abs_diff,
        "servers": len(publication.servers_ok),
        "skipped": publication.skipped,
        "sent_bytes": publication.sent_bytes,
        "whole_bytes": publication.whole_bytes,
    }
    for name in ("share_changed", "generation_share"):
        if (value := getattr(publication, name)) is not None:
            metrics[name] = value
    return {f"weight_sync/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True)
class PublicationRecord(Record):
    """A publication, and the step that made its version."""

    publication: PublishRecord


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """An evaluation that has ended. Its line holds the evaluation's own fields, and the best of a row by its name."""

    evaluation: Evaluation

    def flat(self) -> dict[str, Any]:
        line: dict[str, Any] = msgspec.to_builtins(self.evaluation)
        if self.evaluation.best is not None:
            line[self.evaluation.best_name] = self.evaluation.best
        return line

    @classmethod
    def of(cls, line: dict[str, Any]) -> Self:
        evaluation = msgspec.convert(line, Evaluation)
        return cls(evaluation.step, evaluation)


def beside(line: Mapping[str, Any], ended: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Add metrics of evaluations to a line of `metrics.jsonl`.

    The newest step's stand under their own names, all others under `EARLIER`, those that the line has already included.

    Args:
        ended: Metrics of evaluations that have ended.
    """
    other = {name: value for name, value in line.items() if not name.startswith(EVAL)}
    has = {name: value for name, value in line.items() if name not in other}
    known = [*has.pop(EARLIER, ()), *([has] if has else ()), *ended]
    *earlier, newest = sorted(known, key=lambda values: values[EVAL_STEP]) or [{}]
    return {**other, **newest, **({EARLIER: earlier} if earlier else {})}
