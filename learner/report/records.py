"""The lines of `metrics.jsonl` and `publications.jsonl`.

What people read of an evaluation: its line in `evaluations.jsonl`, on the terminal and in the summary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

import msgspec

from learner.feed.judged_groups import StepCounts
from learner.report.journal import Record
from learner.training.trainer import StepFigures
from protocol.messages import LearnerReport
from protocol.status import Evaluation
from weight_sync.fleet.publications import PublishRecord

FILE_NAME = "evaluations.jsonl"

# In a line of `metrics.jsonl`: the figures of those that ended by the same step and are not the newest, one mapping for
# each, in the order of their steps.
EARLIER = "eval/earlier"

_STEP = "eval/step"


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """An evaluation that has ended; its line holds the evaluation's own fields, and what it calls the best of a row."""

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
    """A line of `metrics.jsonl` with the figures of evaluations that have `ended` besides those that it has: the newest
    step's under their names, all others under `EARLIER`."""
    other = {name: value for name, value in line.items() if not name.startswith("eval/")}
    has = {name: value for name, value in line.items() if name not in other}
    known = [*has.pop(EARLIER, ()), *([has] if has else ()), *ended]
    *earlier, newest = sorted(known, key=lambda figures: figures[_STEP]) or [{}]
    return {**other, **newest, **({EARLIER: earlier} if earlier else {})}


@dataclass(frozen=True)
class StepTimes:
    """step_s: seconds from one acknowledgement to the next, of which `wait_s` for groups and `publish_blocked_ms` for
    the version before to be handed over; cpu_s: CPU seconds of the whole process in the same time."""

    wait_s: float
    step_s: float
    cpu_s: float
    publish_blocked_ms: float


# What the status page and `/metrics` show of a step, by its names in `metrics.jsonl`; the most important first.
MAIN_METRICS = (
    *("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"),
    *("loss", "grad_norm", "learning_rate", "entropy", "kl", "kl_reference", "sampler/kl_staleness_0", "clip_ratio/*"),
    *("sampler/distance/*", "ess", "sampler/ratio_p*", "mfu"),
    *("weight_sync/pause_s", "weight_sync/transfer_s", "weight_sync/sent_bytes", "weight_sync/share_changed"),
    *("tools/call_frequency", "tools/failure_frequency", "rewards/*/mean", "tools/*_frequency"),
)

MAX_REPORTED = 64


@dataclass(frozen=True)
class StepRecord(Record):
    """An optimiser step, which made `version`. Its line has the names of TRL 1.16 where the meaning is the same.

    num_tokens: prompt and sampled tokens of all groups that arrived, from the start of the run to this step;
    weight_sync: figures of the newest publication that counted since the step before; evaluations: of each that ended
    since then; `eval/step` says which step it belongs to. Both are for people, so they are not read back.
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
    tally: StepCounts
    figures: StepFigures
    times: StepTimes
    num_tokens: int = 0
    evaluations: Sequence[Mapping[str, float]] = ()
    weight_sync: Mapping[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        line = super().flat()
        return beside(line, line.pop("evaluations"))

    def derived(self) -> dict[str, Any]:
        trained, step_s = self.tally.tokens_trained, self.times.step_s
        return {
            "train_tokens_per_s": trained / step_s if step_s else None,
            "forwarded_per_trained": self.tally.tokens_forwarded / trained if trained else None,
        }

    def report(self, publishing: int | None) -> LearnerReport:
        """What the status page shows of it; `publishing` is the version on its way to the servers."""
        return LearnerReport(
            step=self.step,
            reward_mean=self.tally.reward_mean,
            wait_s=self.times.wait_s,
            step_s=self.times.step_s,
            tokens_trained=self.tally.tokens_trained,
            staleness_mean=self.tally.staleness_mean,
            staleness_max=self.tally.staleness_max,
            publishing=publishing,
            metrics=main_metrics(self.flat()),
        )


def main_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """The main figures of a step's line, as far as they are finite."""
    names = [name for pattern in MAIN_METRICS for name in line if fnmatchcase(name, pattern)]
    finite = {name: line[name] for name in names if line[name] is not None and math.isfinite(line[name])}
    return dict(list(finite.items())[:MAX_REPORTED])


def published(publication: PublishRecord) -> dict[str, float]:
    """A publication's figures in a step's line."""
    figures = {
        "transfer_s": publication.transfer_s,
        "pause_s": publication.pause_s,
        "probe_max_abs_diff": publication.probe_max_abs_diff,
        "servers": len(publication.servers_ok),
        "skipped": publication.skipped,
        "sent_bytes": publication.sent_bytes,
        "whole_bytes": publication.whole_bytes,
    }
    if publication.share_changed is not None:
        figures["share_changed"] = publication.share_changed
    return {f"weight_sync/{name}": value for name, value in figures.items()}


@dataclass(frozen=True)
class PublicationRecord(Record):
    """A publication, and the step that made its version."""

    publication: PublishRecord
