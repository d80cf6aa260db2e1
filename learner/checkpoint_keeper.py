"""Decides when checkpoints are written and which of them are kept.

One is written every so many steps, at the end, and after a signal if the grace time allows. One that cannot be written,
as on a full disk, is reported; the run continues and tries again when the next is due. At the end there is no next one,
so there it ends the run. A learner whose place another has taken writes none: it would lie among those of the other's
steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from learner import start
from learner.checkpoints import checkpoint as checkpoints
from learner.checkpoints.checkpoint import Checkpoint, CheckpointError, CheckpointInfo
from learner.evaluator import Evaluator
from learner.feed.blocking_client import BlockingQueueClient
from learner.ranks.stopping import Stop
from learner.report.progress import TerminalProgress
from learner.report.records import EvaluationRecord
from learner.training.trainer import Trainer
from protocol import checkpoints as places
from protocol.checkpoints import Best
from protocol.client import QueueError
from protocol.config import RunConfig
from protocol.messages import RunPosition

# A checkpoint may take this many times as long as the one before.
MARGIN = 1.5

REPORT_TIMEOUT_S = 5.0

# Bytes that any disk writes in a second. Estimates the first checkpoint; later ones are timed.
DISK_BYTES_PER_S = 50e6


class CheckpointKeeper:
    """One session's checkpoints.

    Args:
        checkpointed: Step of the newest checkpoint; None before the first.
        evaluator: Needed to keep the checkpoint with the best evaluation.
        report: Called with the error text of a checkpoint that could not be written.
        on_saved: Called with each complete checkpoint, except one that a signal asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        client: BlockingQueueClient,
        progress: TerminalProgress,
        stop: Stop,
        checkpointed: int | None,
        evaluator: Evaluator | None = None,
        report: Callable[[str], None] = lambda text: None,
        on_saved: Callable[[Checkpoint], None] = lambda checkpoint: None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._client = client
        self._progress = progress
        self._stop = stop
        self._checkpointed = checkpointed
        self._evaluator = evaluator if config.learner.keep_best else None
        self._report = report
        self._best: Best | None = None
        self._took_s: float | None = None
        self._saved: Checkpoint | None = None
        self._on_saved = on_saved

    def keep_if_due(self, position: RunPosition, wanted: bool = False) -> None:
        """Write a checkpoint after a step if one is due or `wanted`, and tell the queue."""
        every = self._config.learner.checkpoint_every
        if not (wanted or (every and position.step % every == 0)):
            return
        try:
            self._keep(position)
        except CheckpointError as error:
            there = (
                "there is none yet" if self._checkpointed is None else f"step {self._checkpointed}'s stays the newest"
            )
            following = position.step - position.step % every + every if every else self._config.learner.steps
            text = f"{error}; {there}, and the next is tried after step {following}: make room on that disk"
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
                f"{error}; the run cannot end without it: make room on that disk, and go on from {newest} with --resume"
            ) from error

    def _keep(self, position: RunPosition) -> None:
        if self._checkpointed != position.step:
            if (newer := self._newer_session(position)) is not None:
                raise QueueError(
                    f"learner session {position.session} is not the current one, {newer}: another learner has begun, "
                    f"and no checkpoint of step {position.step} is written"
                )
            info = self._save(position)
            self._client.call(lambda queue: queue.checkpointed(position.session, info.step))
            if self._saved is not None:
                self._on_saved(self._saved)

    def settle(self) -> None:
        """Name the best checkpoint after the last evaluation, and delete those kept only until it was known."""
        if self._evaluator is not None:
            checkpoints.prune(self._config.run_dir, self._config.learner.keep_checkpoints, self._spared())

    def leave(self, position: RunPosition, halfway: bool) -> None:
        """Write a checkpoint after a signal if there is time, and say how to resume.

        Args:
            halfway: Whether the weights hold a step that the queue has not acknowledged.
        """
        say, step, stopped = self._progress.say, position.step, f"stopped after step {position.step}"
        expected_s, left_s = self._expected_s(), self._stop.left_s
        if halfway:
            say(f"{stopped}; there is no checkpoint of it, since the queue does not answer")
        elif step == (self._checkpointed or 0):
            say(stopped)
        elif expected_s > left_s:
            say(
                f"{stopped}; there is no time for a checkpoint: it may take {expected_s:.0f} s, and {left_s:.0f} s are "
                f"left of deploy.grace_s = {self._config.deploy.grace_s:g}"
            )
        elif (newer := self._newer_session(position)) is not None:
            say(f"{stopped}; there is no checkpoint of it: another learner has begun, session {newer}", whole=True)
            return
        else:
            say(f"{stopped}; writing a checkpoint of it")
            self._last(position)
        if step == 0:
            say(f"start it again with: {start.command()}", whole=True)
        elif self._checkpointed is None:
            say(f"there is no checkpoint: begin again at the first step with: {start.resume_command()}", whole=True)
        elif self._checkpointed < self._config.learner.steps:
            say(f"go on from step {self._checkpointed} with: {start.resume_command()}", whole=True)
        else:
            say(f"all steps are done; end the run with: {start.resume_command()}", whole=True)

    def _last(self, position: RunPosition) -> None:
        try:
            info = self._save(position)
        except CheckpointError as error:
            self._progress.warn(str(error))
            return
        # If the queue does not answer now, it learns of it when the run is resumed.
        with suppress(QueueError, TimeoutError):
            self._client.call(
                lambda queue: asyncio.wait_for(queue.checkpointed(position.session, info.step), REPORT_TIMEOUT_S)
            )

    def _newer_session(self, position: RunPosition) -> int | None:
        """Return the session of a learner that has begun since; None if there is none, or if the queue does not
        answer: a resume compares the checkpoint with the queue's history anyway (`resuming.astray`)."""
        try:
            session = self._client.call(lambda queue: asyncio.wait_for(queue.position(), REPORT_TIMEOUT_S)).session
        except (QueueError, TimeoutError):
            return None
        return session if session > position.session else None

    def _save(self, position: RunPosition) -> CheckpointInfo:
        began = time.monotonic()
        config = self._config
        info = CheckpointInfo(position.step, position.version, start.settings(config), position.run)
        sources = checkpoints.Sources(config.model, config.chat.template)
        kept = config.learner.keep_checkpoints
        self._saved = checkpoints.save(config.run_dir, info, self._trainer, sources, kept, self._spared())
        self._checkpointed, self._took_s = info.step, time.monotonic() - began
        return info

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

    def _expected_s(self) -> float:
        if self._took_s is not None:
            return MARGIN * self._took_s
        weights = sum(weight.numel() * weight.element_size() for weight in self._trainer.policy.parameters())
        copies = 3 + (self._config.learner.reference_sync_steps > 0)  # AdamW keeps two values for each weight
        return copies * weights / DISK_BYTES_PER_S


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
