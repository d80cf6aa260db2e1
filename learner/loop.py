"""The learner's loop: lease, train, acknowledge, publish, checkpoint.

A version is acknowledged at the queue before anyone can see it and before a checkpoint holds it: so no version number
is ever used twice, whichever process dies. SIGTERM and Ctrl-C abandon the step, unless its weights change already: then
they wait until it is acknowledged. Leases are given back, and a checkpoint is written if the grace time allows.

Whether an adapter is published by itself or merged into the model's weights: the run file, then the servers say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from learner import evaluator, start
from learner.callbacks import Callbacks
from learner.checkpoint_keeper import CheckpointKeeper
from learner.checkpoints import checkpoint as checkpoints
from learner.checkpoints.checkpoint import Checkpoint
from learner.checkpoints.model_card import Results
from learner.checkpoints.uploads import Models
from learner.evaluator import Evaluator
from learner.feed.blocking_client import BlockingQueueClient
from learner.feed.feeder import Feeder
from learner.model.adapter import Adapter
from learner.ranks.stopping import Stop, Stopped
from learner.report.progress import TerminalProgress
from learner.report.queue_status import PendingNotices
from learner.report.records import StepRecord, StepTimes
from learner.report.reports import Reports
from learner.report.sampler_checks import ServerWatch
from learner.skipping import Attempts
from learner.training.trainer import StepFigures, Trainer
from protocol.client import QueueError, RunFinished
from protocol.config import RunConfig, adapter_checks
from weight_sync.fleet import adapter_publication
from weight_sync.publisher import Publisher
from weight_sync.weights.snapshot import Probe, Snapshot, probe_token_ids

if TYPE_CHECKING:
    from transformers import TrainerCallback


def adapter_published_alone(
    config: RunConfig, adapter: Adapter, probe: Probe, on_gpu: bool, say: Callable[[str], None], run_id: str
) -> bool:
    """on_gpu: whether the learner is. With `weight_sync.adapter_only = "auto"` a server is asked to load it, and what
    keeps vLLM from it is said; with true the publication itself finds out. Blocks."""
    wanted = config.weight_sync.adapter_only
    if merged := adapter_checks.merged_adapter_message(wanted, config.model, config.lora, on_gpu):
        say(merged)
    if not adapter_checks.is_adapter_published_alone(wanted, config.model, config.lora, on_gpu):
        return False
    if wanted is True:
        return True
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    reason = adapter_publication.adapter_refusal(config, Snapshot(0, adapter.alone(), probe, dtype, run_id=run_id))
    if reason is not None:
        say(f"the merged weights are published, since {reason}")
    return reason is None


# What trackers may have to send the last steps, when the run does not come to its end.
ENDED_CLOSE_S = 10.0

TOLD_WITHIN_S = 5.0


class Loop:
    """One session of the learner at the queue."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        client: BlockingQueueClient,
        publisher: Publisher,
        progress: TerminalProgress,
        stop: Stop,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._client = client
        self._publisher = publisher
        self._progress = progress
        self._stop = stop
        self._loaded = callbacks
        self._recorded = 0
        # Whether an adapter is published by itself; None: not decided yet.
        self._alone: bool | None = None
        # torch calls it right before weights change.
        trainer.optimiser.optimizer.register_step_pre_hook(lambda *_: stop.hold())
        trainer.team.guard(stop)

    def run(self, checkpoint: Checkpoint | None, resume: bool) -> None:
        """Train to the last step. Raises `QueueError`, `PublishError`, `LearnerFailed`, `Stopped`."""
        config, client, progress = self._config, self._client, self._progress
        begin = start.session(config, checkpoint, resume, self._trainer.policy.vocabulary_size)
        with progress.phase("waiting for the queue"):
            self._position = client.call(lambda queue: queue.begin_session(begin))
        self._publisher.session, self._publisher.run_id = self._position.session, self._position.run
        self._trainer.team.on_silent(self._rank_is_silent)
        checkpoints.set_aside(config.run_dir, begin.step)
        self._reports = Reports(config, begin.step, progress)
        journal = evaluator.open_eval_journal(config, begin.step)
        self._evaluator = Evaluator(config, client, self._position.session, journal, progress)
        self._troubles = PendingNotices()
        newest = begin.step if checkpoint else None
        self._keeper = CheckpointKeeper(
            config, self._trainer, client, progress, self._stop, newest, self._evaluator, self._troubles.checkpoint
        )
        most = config.learner.skip_bad_batches
        self._watch = ServerWatch()
        self._attempts = Attempts(self._trainer, most, config.run_dir, begin.step, progress, self._troubles.batch)
        self._keeper.on_saved = self._saved
        self._models = Models(config, progress)
        try:
            self._callbacks = self._begin_callbacks(begin.step)
            self._run_session()
        except BaseException as error:
            if isinstance(error, Stopped):
                self._keeper.leave(self._position, error.halfway)
            self._reports.close(min(ENDED_CLOSE_S, max(0.5, self._stop.left_s / 2)))
            raise
        self._reports.close()
        self._models.close()

    def _begin_callbacks(self, step: int) -> Callbacks:
        """They begin when the session does: what they do in `on_train_begin` must not come before."""
        tokenizer = start.tokenizer(self._config.model) if self._loaded else None
        callbacks = Callbacks(
            self._loaded,
            self._config,
            self._trainer,
            step,
            tokenizer,
            lambda what: self._client.waiting(self._position.session, what),
        )
        callbacks.begin()
        return callbacks

    def _saved(self, checkpoint: Checkpoint) -> None:
        evaluated = [(of.step, of.evaluation.reward) for of in self._evaluator.records]
        known = [(step, reward) for step, reward in evaluated if reward is not None]
        self._models.saved(checkpoint.model_path, Results(checkpoint.info.step, self._reports.rewards, known))
        self._callbacks.saved()

    def _rank_is_silent(self, who: str | None) -> None:
        """On a thread: the main one may be in a collective with that rank."""
        what = who and f"a sign of life of {who}"
        with suppress(QueueError, TimeoutError):  # it is said here, too
            self._client.call(
                lambda queue: asyncio.wait_for(queue.waiting(self._position.session, what), TOLD_WITHIN_S)
            )

    def _run_session(self) -> None:
        what = f"publishing version {self._position.version} to the vLLM servers"
        with self._progress.phase(what), self._client.waiting(self._position.session, f"loading: {what}"):
            self._publish()
            self._finish_publication()
        self._evaluator.begin()
        self._evaluator.ask_if_due(self._position.step, self._published)
        pin = self._trainer.device.type == "cuda"
        with Feeder(self._config, self._client, self._position, pin=pin) as feeder:
            self._publisher.on_failure = feeder.fail
            self._trainer.team.on_lost(feeder.fail)
            self._train(feeder)
        with self._progress.phase(f"publishing version {self._position.version}"):
            if self._published != self._position.version:
                self._publish()
            self._finish_publication()
        ended = self._callbacks.stopped
        if ended or self._position.step == self._config.learner.steps:  # after the publication, to see the last weights
            wanted = ended and self._config.eval.at_end
            self._evaluator.ask_if_due(self._position.step, self._published, wanted)
        self._keeper.keep_last(self._position)
        self._evaluator.wait()
        self._keeper.settle()
        late = self._evaluator.fresh()
        self._reports.late(late)
        self._callbacks.evaluated(late)
        self._callbacks.end()
        self._conclude()

    def _train(self, feeder: Feeder) -> None:
        learner, reports = self._config.learner, self._reports
        ended, cpu, blocked_s, wait_s = time.perf_counter(), time.process_time(), 0.0, 0.0
        while self._position.step < learner.steps:
            if self._callbacks.stopped:
                self._progress.say(f"ending after step {self._position.step}: a callback asked for it")
                return
            if not wait_s:
                self._callbacks.step_begins()
            waiting = time.perf_counter()
            try:
                with self._progress.phase("waiting for groups"):
                    batch = feeder.next_batch()
            except RunFinished:
                return
            wait_s += time.perf_counter() - waiting
            figures = self._attempts.step(batch, feeder)
            if figures is None:
                continue
            step_s, cpu_s = time.perf_counter() - ended, time.process_time() - cpu
            times = StepTimes(wait_s, step_s, cpu_s, publish_blocked_ms=blocked_s * 1e3)
            ended, cpu, wait_s = ended + step_s, cpu + cpu_s, 0.0
            tokens = batch.tally.tokens + reports.num_tokens
            self._record_publications()
            record = StepRecord(
                *(batch.step, batch.version + 1, batch.tally, figures, times, tokens),
                *(self._evaluator.fresh(), reports.weight_sync()),
            )
            self._watch_servers(figures)
            report = self._troubles.told_in(record.report(self._publisher.in_flight))
            self._position = feeder.trained(batch, report)
            reports.step(record, batch.samples)
            self._stop.release()
            blocked_s = self._publish() if batch.step % self._config.weight_sync.every == 0 else 0.0
            reports.show(record, batch.samples, self._evaluator.records)
            wish = self._callbacks.stepped(record)
            if batch.step < learner.steps and not wish.stop:
                self._evaluator.ask_if_due(batch.step, self._published, wish.evaluate)
            self._keeper.keep_if_due(self._position, wish.save)

    def _watch_servers(self, figures: StepFigures) -> None:
        for text in self._watch.step(figures.beside):
            self._progress.warn(text)
            self._troubles.server(text)

    def _conclude(self) -> None:
        status = self._client.call(lambda queue: queue.status())
        # The figures first: a run that is finished is not entered again.
        self._reports.summarise(status, self._evaluator.records)
        self._client.call(lambda queue: queue.finish(self._position.session))
        self._reports.conclude(status)

    def _weights(self, probe: Probe) -> Iterable[tuple[str, torch.Tensor]]:
        """What is published, with `probe`."""
        adapter = self._trainer.policy.adapter
        if adapter is None:
            return self._trainer.weights()
        if self._alone is None:
            on_gpu = self._trainer.device.type == "cuda"
            self._alone = adapter_published_alone(
                self._config, adapter, probe, on_gpu, self._progress.say, self._position.run
            )
        return adapter.alone() if self._alone else self._trainer.weights()

    def _publish(self) -> float:
        """Hand the weights over; returns the seconds that this took."""
        version = self._position.version
        ids = probe_token_ids(
            self._trainer.policy.vocabulary_size, version // self._config.weight_sync.every, self._config.run.seed
        )
        probe = Probe(ids, self._trainer.score(ids))
        with self._client.waiting(self._position.session, "publication"):
            blocked_s = self._publisher.publish(version, self._weights(probe), probe)
        self._published = version
        self._record_publications()
        return blocked_s

    def _finish_publication(self) -> None:
        with self._client.waiting(self._position.session, "publication"):
            self._publisher.wait()
        self._record_publications()

    def _record_publications(self) -> None:
        ended = self._publisher.records[self._recorded :]
        self._reports.publications(ended, offset=self._position.version - self._position.step)
        self._recorded += len(ended)
