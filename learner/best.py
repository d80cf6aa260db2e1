"""Which checkpoint is the best by evaluation, and which ones stay for it. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from learner.report.evaluations import EvaluationRecord
from protocol.checkpoints import Best


def best_of(steps: Collection[int], evaluations: Sequence[EvaluationRecord]) -> Best | None:
    """Of the checkpoints of `steps`, that whose own evaluation gave the highest mean reward; the earlier of two.

    An evaluation that was cut short does not count: its rows are the quick ones.
    """
    judged = [
        Best(record.step, record.evaluation.reward)
        for record in evaluations
        if record.step in steps and record.evaluation.ended == "complete" and record.evaluation.reward is not None
    ]
    return max(judged, key=lambda one: (one.reward, -one.step), default=None)


def spared(steps: Collection[int], best: Best | None, pending: Collection[int]) -> set[int]:
    """The steps whose checkpoints must not be deleted, however old: that of the best, and those that may prove better,
    as their evaluation goes on."""
    return {*(step for step in pending if step in steps), *([] if best is None else [best.step])}
