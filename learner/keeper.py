"""When checkpoints are written: every so many steps, at the end, and after a signal if the grace time allows."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from learner import checkpoint as checkpoints
from learner import start
from learner.blocking_client import BlockingQueueClient
from learner.checkpoint import CheckpointInfo
from learner.report.progress import Progress
from learner.stopping import Stop
from learner.trainer import Trainer
from protocol.client import QueueError
from protocol.config import RunConfig
from protocol.messages import RunPosition

# A checkpoint may take this much longer than the one before.
MARGIN = 1.5
REPORT_TIMEOUT_S = 5.0
# What a disk surely writes in a second, before a checkpoint was timed.
DISK_BYTES_PER_S = 50e6


class Keeper:
    """One session's checkpoints. `checkpointed`: the step of the newest, None where there is none."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        client: BlockingQueueClient,
        progress: Progress,
        stop: Stop,
        checkpointed: int | None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._client = client
        self._progress = progress
        self._stop = stop
        self._checkpointed = checkpointed
        self._took_s: float | None = None

    def keep_if_due(self, position: RunPosition) -> None:
        """After a step: write a checkpoint if it is the turn of one, and tell the queue."""
        every = self._config.learner.checkpoint_every
        if every and position.step % every == 0:
            self.keep(position)

    def keep(self, position: RunPosition) -> None:
        """Write a checkpoint of `position`, unless there is one, and tell the queue. Raises `OSError`, `QueueError`."""
        if self._checkpointed != position.step:
            info = self._save(position)
            self._client.call(lambda queue: queue.checkpointed(position.session, info.step))

    def leave(self, position: RunPosition, halfway: bool) -> None:
        """After a signal: a checkpoint if there is time, and how to go on. `halfway`: the weights hold a step that the
        queue has not acknowledged."""
        say, step, told = self._progress.say, position.step, f"stopped after step {position.step}"
        expected_s, left_s = self._expected_s(), self._stop.left_s
        if halfway:
            say(f"{told}; there is no checkpoint of it, since the queue does not answer")
        elif step == (self._checkpointed or 0):
            say(told)
        elif expected_s > left_s:
            say(
                f"{told}; there is no time for a checkpoint: it may take {expected_s:.0f} s, and {left_s:.0f} s are "
                f"left of deploy.grace_s = {self._config.deploy.grace_s:g}"
            )
        else:
            say(f"{told}; writing a checkpoint of it")
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
        except OSError as error:
            self._progress.warn(f"the checkpoint could not be written: {error}")
            return
        # A queue that does not hear of it now will when the run is resumed.
        with suppress(QueueError, TimeoutError):
            self._client.call(
                lambda queue: asyncio.wait_for(queue.checkpointed(position.session, info.step), REPORT_TIMEOUT_S)
            )

    def _save(self, position: RunPosition) -> CheckpointInfo:
        began = time.monotonic()
        config = self._config
        info = CheckpointInfo(position.step, position.version, start.settings(config))
        sources = checkpoints.Sources(config.model, config.chat.template)
        checkpoints.save(config.run_dir, info, self._trainer, sources, config.learner.keep_checkpoints)
        self._checkpointed, self._took_s = info.step, time.monotonic() - began
        return info

    def _expected_s(self) -> float:
        if self._took_s is not None:
            return MARGIN * self._took_s
        weights = sum(weight.numel() * weight.element_size() for weight in self._trainer.policy.parameters())
        copies = 3 + (self._config.learner.reference_sync_steps > 0)  # AdamW has two figures for each weight
        return copies * weights / DISK_BYTES_PER_S
