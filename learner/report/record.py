"""The lines of `metrics.jsonl` and `publications.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from learner.feed.tally import Tally
from learner.report.journal import Record
from learner.trainer import StepFigures
from protocol.messages import LearnerReport
from weight_sync.publisher import PublishRecord


@dataclass(frozen=True)
class StepTimes:
    """step_s: seconds from one acknowledgement to the next, of which `wait_s` for groups and `publish_blocked_ms` for
    the version before to be handed over; cpu_s: CPU seconds of the whole process in the same time."""

    wait_s: float
    step_s: float
    cpu_s: float
    publish_blocked_ms: float


@dataclass(frozen=True)
class StepRecord(Record):
    """An optimiser step, which made `version`."""

    version: int
    tally: Tally
    figures: StepFigures
    times: StepTimes

    def report(self, publishing: int | None) -> LearnerReport:
        """What the status page shows of it; `publishing` is the version on its way to the servers."""
        return msgspec.convert({**self.flat(), "publishing": publishing}, LearnerReport)


@dataclass(frozen=True)
class PublicationRecord(Record):
    """A publication, and the step that made its version."""

    publication: PublishRecord
