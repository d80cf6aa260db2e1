"""Begins one session of the learner at the queue, and makes the parts that it works with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.learner import start
from slipstream.learner.callbacks import Callbacks
from slipstream.learner.checkpoint_keeper import CheckpointKeeper
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints.checkpoint import Checkpoint
from slipstream.learner.checkpoints.model_card import Results
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.checkpoints.uploads import Models
from slipstream.learner.collapse import CollapseWatch
from slipstream.learner.evaluator import Evaluator, open_eval_journal
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.queue_session import QueueSession
from slipstream.learner.ranks.stopping import Stop
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.queue_status import PendingNotices
from slipstream.learner.report.reports import Reports
from slipstream.learner.report.sampler_checks import ServerWatch
from slipstream.learner.report.token_views import Texts
from slipstream.learner.skipping import Attempts
from slipstream.learner.training.base import Trainer
from slipstream.protocol.client import QueueError
from slipstream.protocol.config import RunConfig
from slipstream.weight_sync.publisher import Publisher

if TYPE_CHECKING:
    from transformers import TrainerCallback

TOLD_WITHIN_S = 5.0


@dataclass(frozen=True)
class Session:
    """The parts that one session of the learner works with, from the position at which the queue began it.

    Attributes:
        queue: The session at the queue.
        notices: Failures that the queue is not told of yet.
        watch: Compares the servers' samples with the policy.
        collapse: Looks for an update that destroyed the policy.
        attempts: Trains batches, and leaves out those that cannot be trained.
        texts: Returns the text of each of some token ids.
    """

    queue: QueueSession
    reports: Reports
    evaluator: Evaluator
    callbacks: Callbacks
    models: Models
    keeper: CheckpointKeeper
    notices: PendingNotices
    watch: ServerWatch
    collapse: CollapseWatch
    attempts: Attempts
    texts: Texts


def begin_session(
    config: RunConfig,
    trainer: Trainer,
    client: BlockingQueueClient,
    publisher: Publisher,
    progress: TerminalProgress,
    stop: Stop,
    checkpoint: Checkpoint | None,
    resume: bool,
    callbacks: Sequence[TrainerCallback] = (),
    after: int | None = None,
) -> Session:
    """Begin a session at the queue and make its parts. Arguments and errors are those of `train`."""
    trainer.before_change(stop.hold)
    trainer.guard(stop)
    checkpoints.try_files(config.run_dir, trainer, Sources(config.model, config.chat.template))
    begin = start.session(config, checkpoint.info if checkpoint else None, resume, trainer.vocabulary_size, after)
    with progress.phase("waiting for the queue"):
        queue = QueueSession(config, client, publisher, begin, trainer.vocabulary_size)
    session = queue.position.session

    def rank_is_silent(who: str | None) -> None:
        """Tell the queue, from a thread: the main one may be in a collective with that rank."""
        what = who and f"a sign of life of {who}"
        # The terminal shows the same text, so a queue that does not answer costs nothing.
        with suppress(QueueError, TimeoutError):
            client.call(lambda queue: asyncio.wait_for(queue.waiting(session, what), TOLD_WITHIN_S))

    trainer.on_rank_silent(rank_is_silent)
    checkpoints.set_aside(config.run_dir, begin.step)
    reports = Reports(config, begin.step, progress)
    notices = PendingNotices()
    evaluator = Evaluator(config, client, session, open_eval_journal(config, begin.step), progress)
    models = Models(config, progress)
    tokenizer = start.tokenizer(config.model)
    called = Callbacks(callbacks, config, trainer, begin.step, tokenizer, lambda what: client.waiting(session, what))

    def saved(checkpoint: Checkpoint) -> None:
        evaluated = [(of.step, of.evaluation.reward) for of in evaluator.records]
        known = [(step, reward) for step, reward in evaluated if reward is not None]
        models.saved(checkpoint.model_path, Results(checkpoint.info.step, reports.rewards, known))
        called.saved()

    return Session(
        queue=queue,
        reports=reports,
        evaluator=evaluator,
        callbacks=called,
        models=models,
        keeper=CheckpointKeeper(
            config,
            trainer,
            client,
            progress,
            stop,
            checkpoint,
            evaluator,
            notices.checkpoint,
            saved,
        ),
        notices=notices,
        watch=ServerWatch(),
        collapse=CollapseWatch(config),
        texts=start.token_texts(tokenizer),
        attempts=Attempts(
            trainer, config.learner.skip_bad_batches, config.run_dir, begin.step, progress, notices.batch
        ),
    )
