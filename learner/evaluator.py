"""The learner's side of evaluations: asks for those that are due, and collects their results while training continues.
Only the one before the first step is waited for, so that it shows the model as it is.

An evaluation belongs to a step, and a step has one: if a learner that resumes asks for it again, it is not made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.report.journal import Journal
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.records import FILE_NAME, EvaluationRecord
from slipstream.protocol import reasons
from slipstream.protocol.client import QueueRefused
from slipstream.protocol.config import RunConfig
from slipstream.protocol.status import Evaluation, EvaluationRequest, describe_evaluation, evaluation_metrics

_POLL_S = 10.0

# The queue ends an evaluation at its time-out; after this much more it is given up.
_MARGIN_S = 60.0


class Evaluator:
    """One session's evaluations.

    Args:
        journal: Holds evaluations that have ended; None if the run has no evaluations.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        config: RunConfig,
        client: BlockingQueueClient,
        session: int,
        journal: Journal[EvaluationRecord] | None,
        progress: TerminalProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._client = client
        self._session = session
        self._journal = journal
        self._progress = progress
        self._clock = clock
        self._warned = False
        self._open: list[int] = []
        self._fresh: list[Evaluation] = []

    @property
    def records(self) -> Sequence[EvaluationRecord]:
        """The evaluations that have ended, in that order."""
        return self._journal.records if self._journal is not None else ()

    @property
    def pending(self) -> Sequence[int]:
        """Steps whose evaluation is still running."""
        return self._open

    def begin(self) -> None:
        """Collect the evaluations that an earlier session of the run has asked for."""
        if self._journal is not None:
            self._take_in(self._journal, self._client.call(lambda queue: queue.evaluations()))

    def ask_if_due(self, step: int, version: int, wanted: bool = False) -> None:
        """Ask for the evaluation of `step` if one is due.

        Args:
            version: The newest that was published.
            wanted: Whether one is due whatever the run file says, if the run has evaluations at all.
        """
        settings = self._config.eval
        if wanted and self._journal is None and not self._warned:
            self._warned = True
            self._progress.warn(
                f"a callback asks for an evaluation of step {step}, and this run has none: give an eval_dataset, and "
                f"set eval.every or eval.at_end"
            )
        due = wanted or settings.is_due(step, self._config.learner.steps)
        if self._journal is None or not due or any(record.step == step for record in self.records):
            return
        request = EvaluationRequest(
            session=self._session,
            step=step,
            version=version,
            rows=None if isinstance(settings.rows, str) else settings.rows,
            group_size=settings.group_size,
            temperature=settings.temperature,
            timeout_s=settings.timeout_s,
        )
        try:
            self._take_in(self._journal, self._client.call(lambda queue: queue.evaluate(request)))
        except QueueRefused as refusal:
            if refusal.reason != reasons.EVALUATIONS_OPEN:
                raise
            self._progress.warn(f"there is no evaluation of step {step}: {refusal}")

    def fresh(self) -> list[dict[str, float]]:
        """Return the metrics of each evaluation that ended since the last call, by step. Each is in the journal."""
        if self._journal is not None and self._open:
            self._take_in(self._journal, self._client.call(lambda queue: queue.evaluations()))
        fresh, self._fresh = self._fresh, []
        return [evaluation_metrics(evaluation) for evaluation in sorted(fresh, key=lambda evaluation: evaluation.step)]

    def wait_for_first(self) -> None:
        """Wait for the evaluation of the model as it is, before a step changes it."""
        if 0 in self._open:
            what = "evaluating the model before its first step"
            self._wait(what, f"loading: {what}", "the first step begins meanwhile")

    def wait(self) -> None:
        """Wait for open evaluations. The queue ends each at its time-out at the latest."""
        what = "the last evaluation" if len(self._open) == 1 else f"the last {len(self._open)} evaluations"
        self._wait(f"waiting for {what}", what, "the run ends without it")

    def _wait(self, phase: str, what: str, otherwise: str) -> None:
        """Wait for open evaluations.

        Args:
            phase: What the terminal shows.
            what: What the learner waits for, on the status page.
            otherwise: What happens where one does not end.
        """
        if self._journal is None or not self._open:
            return
        deadline = self._clock() + self._config.eval.timeout_s + _MARGIN_S
        with self._progress.phase(phase), self._client.waiting(self._session, what):
            while self._open and self._clock() < deadline:
                self._take_in(self._journal, self._client.call(lambda queue: queue.evaluations(wait_s=_POLL_S)))
        for step in self._open:
            self._progress.warn(f"the evaluation of step {step} did not end in time; {otherwise}")

    def _take_in(self, journal: Journal[EvaluationRecord], evaluations: Sequence[Evaluation]) -> None:
        known = {record.step for record in journal.records}
        self._open = [evaluation.step for evaluation in evaluations if evaluation.ended is None]
        for evaluation in evaluations:
            if evaluation.ended is not None and evaluation.step not in known:
                journal.append(EvaluationRecord(evaluation.step, evaluation))
                self._fresh.append(evaluation)
                self._progress.show_evaluation(evaluation, describe_evaluation(evaluation))


def open_eval_journal(config: RunConfig, step: int) -> Journal[EvaluationRecord] | None:
    """Open the journal of the run's evaluations up to `step`; None where there are none and none are to come."""
    path = config.run_dir / FILE_NAME
    return Journal(path, EvaluationRecord, step) if config.eval.is_on or path.exists() else None
