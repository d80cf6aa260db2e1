"""Decides when checkpoints are written and which of them are kept.

One is written every so many steps and minutes, at the end, after Ctrl-C, and after SIGTERM unless the measured speed of
the disk says that the grace time is too short. One that cannot be written, as on a full disk, is reported; the run
continues and tries again when the next is due. At the end there is no next one, so there it ends the run. A learner
whose place another has taken writes none: it would lie among those of the other's steps.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from math import inf

from slipstream.learner import start
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointError, CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.evaluator import Evaluator
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.records import EvaluationRecord
from slipstream.learner.training.base import Trainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol.checkpoints import Best
from slipstream.protocol.client import QueueError
from slipstream.protocol.collapse import CAUSE
from slipstream.protocol.config import LearnerSection, RunConfig
from slipstream.protocol.config.learning_rates import lower_rate
from slipstream.protocol.messages import RunPosition

# A checkpoint may take this many times as long as the one before.
MARGIN = 1.5

REPORT_TIMEOUT_S = 5.0

# Tells how long the first checkpoint may take; later ones are timed.
USUAL_BYTES_PER_S = 200e6


class CheckpointKeeper:
    """One session's checkpoints.

    Args:
        newest: The checkpoint that the session continues from; None if it began at the initial model.
        evaluator: Needed to keep the checkpoint with the best evaluation.
        report: Called with the error text of a checkpoint that could not be written.
        on_saved: Called with each complete checkpoint, except one that a signal asked for.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        client: BlockingQueueClient,
        progress: TerminalProgress,
        stop: Stop,
        newest: Checkpoint | None,
        evaluator: Evaluator | None = None,
        report: Callable[[str], None] = lambda text: None,
        on_saved: Callable[[Checkpoint], None] = lambda checkpoint: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._client = client
        self._progress = progress
        self._stop = stop
        self._newest = newest
        self._evaluator = evaluator if config.learner.keep_best else None
        self._report = report
        self._best: Best | None = None
        self._untold = False  # whether the queue does not know of the newest one
        self._on_saved = on_saved
        self._clock = clock
        self._tried_at = self._stepped_at = clock()

    @property
    def _checkpointed(self) -> int | None:
        """Step of the newest checkpoint; None before the first."""
        return None if self._newest is None else self._newest.info.step

    def keep_if_due(self, position: RunPosition, wanted: bool = False) -> None:
        """Write a checkpoint after a step if one is due or `wanted`, and tell the queue."""
        learner, now = self._config.learner, self._clock()
        step_s, self._stepped_at = now - self._stepped_at, now
        if not (wanted or is_due(learner, position.step, now - self._tried_at, step_s)):
            return
        self._tried_at = now
        try:
            self._keep(position)
        except CheckpointError as error:
            there = (
                "there is none yet" if self._checkpointed is None else f"step {self._checkpointed}'s stays the newest"
            )
            text = f"{error}; {there}, and the next is tried {next_try(learner, position.step)}: make room on that disk"
            self._progress.warn(text)
            self._report(text)

    def keep_last(self, position: RunPosition) -> None:
        """Write a checkpoint at the end of the run unless there is one of `position`, and tell the queue. Raises
        `CheckpointError`, `QueueError`."""
        try:
            self._keep(position)
        except CheckpointError as error:
            newest = "the first step" if self._checkpointed is None else f"step {self._checkpointed}"
            raise CheckpointError(
                f"{error}; the run cannot end without it: make room on that disk, and continue from {newest} with "
                f"--resume"
            ) from error

    def _keep(self, position: RunPosition) -> None:
        if self._checkpointed != position.step:
            if (newer := self._newer_session(position)) is not None:
                raise QueueError(
                    f"learner session {position.session} is not the current one, {newer}: another learner has begun, "
                    f"and no checkpoint of step {position.step} is written"
                )
            with self._stop.finishing(), self._progress.phase(f"writing the checkpoint of step {position.step}"):
                saved = self._save(position)
            self._client.call(lambda queue: queue.checkpointed(position.session, saved.info.step))
            self._untold = False
            self._on_saved(saved)

    def settle(self) -> None:
        """Name the best checkpoint after the last evaluation, and delete those kept only until it was known."""
        if self._evaluator is not None:
            checkpoints.prune(self._config.run_dir, self._config.learner.keep_checkpoints, self._spared())

    def leave(self, position: RunPosition, halfway: bool) -> None:
        """Write a checkpoint after a signal, unless it sets a limit that is known to be too short, and say how to
        resume.

        Args:
            halfway: Whether the weights hold a step that the queue has not acknowledged.
        """
        say, step = self._progress.say, position.step
        stopped = f"stopped after step {step}" if step else "stopped before the first step"
        size, seconds = self._size(), self._expected_s()
        left_s = self._stop.left_s
        if halfway:
            say(f"{stopped}; there is no checkpoint of step {step + 1}, since the queue does not answer")
        elif step == (self._checkpointed or 0):
            say(f"{stopped}, which has its checkpoint" if step else f"{stopped}: there is nothing to save")
            if self._untold:
                self._tell_queue(position)
        elif seconds is not None and MARGIN * seconds > left_s:
            grace_s = self._config.deploy.grace_s
            say(
                f"{stopped}; there is no time for a checkpoint: it takes {seconds:.0f} to {MARGIN * seconds:.0f} s, "
                f"and {left_s:.0f} s are left of deploy.grace_s = {grace_s:g}"
            )
        elif (newer := self._newer_session(position)) is not None:
            say(f"{stopped}; there is no checkpoint of it: another learner has begun, session {newer}", whole=True)
            return
        else:
            about_s = size / USUAL_BYTES_PER_S if seconds is None else seconds
            limit = "Ctrl-C again gives it up" if left_s == inf else f"{left_s:.0f} s are left"
            say(
                f"{stopped}; writing a checkpoint of it: {size / 1e6:,.0f} MB, about {max(1.0, about_s):.0f} s; {limit}"
            )
            self._stop.unfinished = f"the checkpoint of step {step} is not complete; {self._how_to_resume(step)}"
            self._last(position)
            self._stop.unfinished = None
        say(self._how_to_resume(step), whole=True)

    def _how_to_resume(self, step: int) -> str:
        status, rate = self._progress.status, None
        if status is not None and any(cause.about == CAUSE for cause in status.diagnosis):
            rate = lower_rate(self._config)
        resume = start.resume_command(rate)
        if step == 0:
            return f"start it again with: {start.command()}"
        if self._checkpointed is None:
            return f"there is no checkpoint: begin again at the first step with: {resume}"
        if self._checkpointed < self._config.learner.steps:
            return f"continue from step {self._checkpointed} with: {resume}"
        return f"all steps are done; end the run with: {resume}"

    def _last(self, position: RunPosition) -> None:
        try:
            with self._progress.phase(f"writing the checkpoint of step {position.step}"):
                self._save(position)
        except CheckpointError as error:
            self._progress.warn(str(error))
            return
        self._tell_queue(position)

    def _tell_queue(self, position: RunPosition) -> None:
        # If the queue does not answer now, it learns of it when the run is resumed.
        with suppress(QueueError, TimeoutError):
            self._client.call(
                lambda queue: asyncio.wait_for(queue.checkpointed(position.session, position.step), REPORT_TIMEOUT_S)
            )

    def _newer_session(self, position: RunPosition) -> int | None:
        """Return the session of a learner that has begun since; None if there is none, or if the queue does not
        answer: a resume compares the checkpoint with the queue's history anyway (`resuming.astray`)."""
        try:
            session = self._client.call(lambda queue: asyncio.wait_for(queue.position(), REPORT_TIMEOUT_S)).session
        except (QueueError, TimeoutError):
            return None
        return session if session > position.session else None

    def _save(self, position: RunPosition) -> Checkpoint:
        config = self._config
        info = CheckpointInfo(position.step, position.version, start.settings(config), position.run)
        sources = Sources(config.model, config.chat.template)
        kept = config.learner.keep_checkpoints
        self._check_room(position.step)
        self._newest = checkpoints.save(config.run_dir, info, self._trainer, sources, kept, self._spared())
        self._tried_at, self._untold = self._clock(), True
        return self._newest

    def _check_room(self, step: int) -> None:
        """Raise `CheckpointError` where the disk has less room than the newest checkpoint took: one that fills the disk
        ends a queue that has its store there."""
        written = 0 if self._newest is None else self._newest.info.written_bytes
        folder = places.folder(self._config.run_dir)
        free = shutil.disk_usage(folder).free if folder.is_dir() else written
        if free < written:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: the one before took {written / 1e6:,.0f} MB, and "
                f"{free / 1e6:,.0f} MB are free in {folder}"
            )

    def _spared(self) -> set[int]:
        """Return the steps whose checkpoints stay, however old. Writes the best one down, and reports it if it is
        another."""
        if self._evaluator is None:
            return set()
        run_dir, evaluator = self._config.run_dir, self._evaluator
        steps = places.complete(run_dir)
        best = best_of(steps, evaluator.records)
        if best is not None and best != (self._best or places.best(run_dir)):
            try:
                places.write_best(run_dir, best)
            except OSError as error:
                raise CheckpointError(f"the best checkpoint's step cannot be written down: {error}") from error
            self._progress.say(
                f"the best checkpoint so far is that of step {best.step}: its evaluation gave reward {best.reward:.3f}"
            )
        self._best = best
        return spared(steps, best, evaluator.pending)

    def _size(self) -> int:
        """Return about how many bytes a checkpoint has."""
        if self._newest is not None and self._newest.info.written_bytes:
            return self._newest.info.written_bytes
        return self._trainer.saved_bytes()

    def _expected_s(self) -> float | None:
        """Return the seconds that the newest checkpoint took; None if that is not known."""
        return (self._newest.info.written_s or None) if self._newest is not None else None


def is_due(learner: LearnerSection, step: int, age_s: float, step_s: float) -> bool:
    """Return whether a checkpoint is due after a step.

    Args:
        age_s: Seconds since the newest one, or since the session began.
        step_s: Seconds of this step: one that would be too old after another such step is due now.
    """
    every, limit_s = learner.checkpoint_every, 60 * learner.checkpoint_minutes
    return (every > 0 and step % every == 0) or (limit_s > 0 and age_s + step_s > limit_s)


def next_try(learner: LearnerSection, step: int) -> str:
    """Say when the next checkpoint is due after one of `step` that failed."""
    every, minutes = learner.checkpoint_every, learner.checkpoint_minutes
    following = step - step % every + every if every else learner.steps
    return f"after step {following}" + (f" or in {minutes:g} min" if minutes else "")


def best_of(steps: Collection[int], evaluations: Sequence[EvaluationRecord]) -> Best | None:
    """Return the checkpoint of `steps` whose own evaluation gave the highest mean reward; the earlier of two.

    An evaluation that was cut short does not count: its rows are the quick ones.
    """
    judged = [
        Best(record.step, record.evaluation.reward)
        for record in evaluations
        if record.step in steps and record.evaluation.ended == "complete" and record.evaluation.reward is not None
    ]
    return max(judged, key=lambda one: (one.reward, -one.step), default=None)


def spared(steps: Collection[int], best: Best | None, pending: Collection[int]) -> set[int]:
    """Return the steps whose checkpoints must not be deleted, however old: the best one, and those that may prove
    better, as their evaluation is still running."""
    return {*(step for step in pending if step in steps), *([] if best is None else [best.step])}
