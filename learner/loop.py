"""The learner's loop: lease, train, acknowledge, publish, checkpoint.

The queue acknowledges a version before anyone can see it and before a checkpoint holds it: no version number is ever
used twice, whichever process dies. SIGTERM and Ctrl-C abandon the step. If its weights are changing already, they wait
until the step is acknowledged. Then leases are given back, and a checkpoint is written if the grace time allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from slipstream.learner.checkpoints.checkpoint import Checkpoint
from slipstream.learner.collapse import PolicyDestroyed
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.feeder import Feeder
from slipstream.learner.feed.step_draft import Batch
from slipstream.learner.model.adapter import Adapter
from slipstream.learner.ranks.liveness import RankLost
from slipstream.learner.ranks.stopping import Stop, Stopped
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.queue_status import Watch
from slipstream.learner.report.records import StepRecord, StepTimes
from slipstream.learner.report.token_views import with_tokens
from slipstream.learner.session import Session, begin_session
from slipstream.learner.training.base import StepMetrics, Trainer
from slipstream.protocol import tracing
from slipstream.protocol.client import RunFinished
from slipstream.protocol.config import RunConfig, adapter_checks
from slipstream.protocol.status import Status
from slipstream.weight_sync.fleet import adapter_publication
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.weights.snapshot import Probe, Snapshot

if TYPE_CHECKING:
    from transformers import TrainerCallback

# Seconds that trackers may take to send the last steps when the run fails or is stopped.
ENDED_CLOSE_S = 10.0


def train(
    config: RunConfig,
    trainer: Trainer,
    client: BlockingQueueClient,
    publisher: Publisher,
    progress: TerminalProgress,
    stop: Stop,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    after: int | None = None,
    watch: Watch | None = None,
) -> None:
    """Begin a session at the queue and train to the last step.

    Args:
        trainer: Holds the weights of `checkpoint`, or the initial model's where that is None.
        stop: Says when a signal asks for the end.
        resume: Whether the run continues; otherwise it begins at step 0.
        callbacks: The user's, see `learner.callbacks`.
        after: See `start.session`.
        watch: Brings the queue's status, by which a wait for a destroyed policy ends.

    Raises:
        ConfigError: Another learner has begun a session meanwhile.
        QueueError: The queue refuses, or cannot be reached.
        PublishError: No server can be given the weights.
        LearnerFailed: A step cannot be trained, an update destroyed the policy, or a callback failed.
        Stopped: A signal ended the run.
    """
    session = begin_session(config, trainer, client, publisher, progress, stop, checkpoint, resume, callbacks, after)
    Loop(config, trainer, client, publisher, progress, stop, session, watch).run()


class Loop:
    """Trains the steps of one session."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        client: BlockingQueueClient,
        publisher: Publisher,
        progress: TerminalProgress,
        stop: Stop,
        session: Session,
        watch: Watch | None = None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._client = client
        self._publisher = publisher
        self._progress = progress
        self._stop = stop
        self._session = session
        self._watch = watch
        self._reports = session.reports
        self._evaluator = session.evaluator
        self._callbacks = session.callbacks
        self._keeper = session.keeper
        self._queue = session.queue
        # Whether an adapter is published by itself; None: not decided yet.
        self._alone: bool | None = None

    def run(self) -> None:
        """Train to the last step. Raises what `train` does."""
        try:
            self._callbacks.begin()
            self._run_session()
        except BaseException as error:
            if isinstance(error, Stopped):
                self._keeper.leave(self._queue.position, error.halfway)
            self._reports.close(min(ENDED_CLOSE_S, max(0.5, self._stop.left_s / 2)))
            if isinstance(error, PolicyDestroyed):
                raise self._session.collapse.set_aside(error) from None
            raise
        self._reports.close()
        self._session.models.close()

    def _run_session(self) -> None:
        queue = self._queue
        what = f"publishing version {queue.position.version} to the vLLM servers"
        self._trainer.on_rank_lost(self._publisher.rank_lost)
        with self._progress.phase(what), queue.waiting(f"loading: {what}"):
            self._publish()
            self._finish_publication()
        self._evaluator.begin()
        self._ask_for_evaluation()
        if queue.position.step == 0:
            self._evaluator.wait_for_first()
        with queue.feeding(*self._trainer.batch_form) as feeder:

            def lost(error: RankLost) -> None:
                self._publisher.rank_lost(error)
                feeder.fail(error)

            def heard(status: Status) -> None:
                if (destroyed := self._session.collapse.waiting(status)) is not None:
                    feeder.fail(destroyed)

            self._trainer.on_rank_lost(lost)
            if self._watch is not None:
                self._watch.on_status = heard
            self._train(feeder)
        with self._progress.phase(f"publishing version {queue.position.version}"):
            if queue.published != queue.position.version:
                self._publish()
            self._finish_publication()
        ended = self._callbacks.stopped
        if ended or queue.position.step == self._config.learner.steps:  # after the publication, to see the last weights
            self._ask_for_evaluation(wanted=ended and self._config.eval.at_end)
        self._keeper.keep_last(queue.position)
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
        while self._queue.position.step < learner.steps:
            if self._callbacks.stopped:
                step = self._queue.position.step
                place = f"after step {step}" if step else "before the first step"
                self._progress.say(f"ending {place}: a callback asked for it")
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
            with tracing.span("step", links=self._traces(batch), step=batch.step, version=batch.version) as span:
                metrics = self._session.attempts.step(batch, feeder)
                if metrics is None:
                    span.fail("left_out")
                    continue
                step_s, cpu_s = time.perf_counter() - ended, time.process_time() - cpu
                times = StepTimes(wait_s, step_s, cpu_s, publish_blocked_ms=blocked_s * 1e3)
                ended, cpu, wait_s = ended + step_s, cpu + cpu_s, 0.0
                tokens = batch.counts.tokens + reports.num_tokens
                self._record_publications()
                record = StepRecord(
                    step=batch.step,
                    version=batch.version + 1,
                    counts=batch.counts,
                    metrics=metrics,
                    times=times,
                    num_tokens=tokens,
                    evaluations=self._evaluator.fresh(),
                    weight_sync=reports.weight_sync(),
                )
                self._watch_servers(metrics)
                scores = self._trainer.scores_of([of.rollout for of in batch.sampled])
                samples = with_tokens(batch, scores, self._session.texts)
                report = self._session.notices.added_to(record.report(self._publisher.in_flight, self._trainer.ranks))
                self._queue.acknowledge(feeder, batch, report)
                span.set(
                    groups=len(batch.ticket_ids), tokens=batch.counts.tokens_trained, reward=batch.counts.reward_mean
                )
                reports.step(record, samples)
                self._stop.release()
                self._session.collapse.step(record)
                blocked_s = self._publish() if batch.step % self._config.weight_sync.every == 0 else 0.0
            reports.show(record, batch.samples, self._evaluator.records)
            wish = self._callbacks.stepped(record)
            if batch.step < learner.steps and not wish.stop:
                self._ask_for_evaluation(wish.evaluate)
            self._keeper.keep_if_due(self._queue.position, wish.save)

    def _traces(self, batch: Batch) -> Iterator[tracing.TicketTrace]:
        """Yield the traces of a batch's groups."""
        return (tracing.TicketTrace(self._queue.position.run, ticket_id) for ticket_id in batch.ticket_ids)

    def _watch_servers(self, metrics: StepMetrics) -> None:
        for text in self._session.watch.step(metrics.beside):
            self._progress.warn(text)
            self._session.notices.server(text)
        for name in self._session.watch.back():
            self._progress.say(f"no longer seen: {name} samples farther from the learner's policy than it did")

    def _conclude(self) -> None:
        status = self._client.call(lambda queue: queue.status())
        # The metrics first: a finished run is not resumed.
        self._reports.summarise(status, self._evaluator.records)
        self._queue.finish()
        self._reports.conclude(status)

    def _hand_over(self, version: int, probe: Probe) -> float:
        """Hand the weights to the publisher, on each rank its share of them. Returns the seconds that this took."""
        trainer, publisher, adapter = self._trainer, self._publisher, self._trainer.adapter
        if adapter is not None:
            if self._alone is None:
                self._alone = adapter_published_alone(
                    self._config, adapter, probe, trainer.on_gpu, self._progress.say, self._queue.position.run
                )
            if self._alone:
                return publisher.publish(version, adapter.alone(), probe)
        if not publisher.by_shares or trainer.shares is None:
            return publisher.publish(version, trainer.weights(), probe)
        told = {"version": version, "kept": publisher.make_room(), "run": self._queue.position.run}
        return trainer.shares(told, lambda share: publisher.publish(version, share, probe))

    def _publish(self) -> float:
        """Hand the weights over. Returns the seconds that this took."""
        blocked_s = self._queue.publish(self._trainer.score, self._hand_over)
        self._record_publications()
        return blocked_s

    def _finish_publication(self) -> None:
        self._queue.wait_published()
        self._record_publications()

    def _ask_for_evaluation(self, wanted: bool = False) -> None:
        assert self._queue.published is not None
        self._evaluator.ask_if_due(self._queue.position.step, self._queue.published, wanted)

    def _record_publications(self) -> None:
        self._reports.publications(self._publisher.records, self._queue.position)


def adapter_published_alone(
    config: RunConfig, adapter: Adapter, probe: Probe, on_gpu: bool, say: Callable[[str], None], run_id: str
) -> bool:
    """Decide whether an adapter is published by itself, or merged into the model's weights.

    With `weight_sync.adapter_only = "auto"` a server is asked to load it; with true the publication itself finds out
    whether it can. Blocks while it asks.

    Args:
        on_gpu: Whether the learner is on a GPU.
        say: Shows a line; called with the reason where the merged weights are published.
    """
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
