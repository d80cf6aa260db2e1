"""The learner's loop: lease, train, acknowledge, publish, checkpoint.

A version is acknowledged at the queue before anyone can see it and before a checkpoint holds it: so no version number
is ever used twice, whichever process dies. SIGTERM and Ctrl-C abandon the step, unless its weights change already: then
they wait until it is acknowledged. Leases are given back, and a checkpoint is written if the grace time allows.
"""

from __future__ import annotations

import time

from learner import evaluations, start
from learner.blocking_client import BlockingQueueClient
from learner.checkpoint import Checkpoint
from learner.evaluations import Evaluator
from learner.feed.feeder import Feeder
from learner.keeper import Keeper
from learner.report.progress import Progress
from learner.report.record import StepRecord, StepTimes
from learner.report.reports import Reports
from learner.stopping import Stop, Stopped
from learner.trainer import Trainer
from protocol.client import RunFinished
from protocol.config import RunConfig
from weight_sync.probe import Probe, probe_token_ids
from weight_sync.publisher import Publisher


class Loop:
    """One session of the learner at the queue."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        client: BlockingQueueClient,
        publisher: Publisher,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._client = client
        self._publisher = publisher
        self._progress = progress
        self._stop = stop
        self._recorded = 0
        self._probe_ids = probe_token_ids(trainer.policy.vocabulary_size)
        # torch calls it right before weights change.
        trainer.optimiser.optimizer.register_step_pre_hook(lambda *_: stop.hold())
        trainer.team.guard(stop)

    def run(self, checkpoint: Checkpoint | None, resume: bool) -> None:
        """Train to the last step. Raises `QueueError`, `PublishError`, `DivergedError`, `Stopped`."""
        config, client, progress = self._config, self._client, self._progress
        begin = start.session(config, checkpoint, resume, self._trainer.policy.vocabulary_size)
        with progress.phase("waiting for the queue"):
            self._position = client.call(lambda queue: queue.begin_session(begin))
        self._publisher.session = self._position.session
        self._keeper = Keeper(config, self._trainer, client, progress, self._stop, begin.step if checkpoint else None)
        self._reports = Reports(config, begin.step, progress)
        journal = evaluations.journal_of(config, begin.step)
        self._evaluator = Evaluator(config, client, self._position.session, journal, progress)
        try:
            self._run_session()
        except Stopped as stopped:
            self._keeper.leave(self._position, stopped.halfway)
            raise

    def _run_session(self) -> None:
        what = f"publishing version {self._position.version} to the vLLM servers"
        with self._progress.phase(what), self._client.waiting(self._position.session, f"loading: {what}"):
            self._publish()
            self._finish_publication()
        self._evaluator.begin()
        self._evaluator.ask_if_due(self._position.step, self._published)
        pin = self._trainer.device.type == "cuda"
        with Feeder(self._config, self._client, self._position, pin=pin) as feeder:
            self._publisher.on_failure = self._trainer.team.on_lost = feeder.fail
            self._train(feeder)
        with self._progress.phase(f"publishing version {self._position.version}"):
            if self._published != self._position.version:
                self._publish()
            self._finish_publication()
        if self._position.step == self._config.learner.steps:  # after the publication, to see the last weights
            self._evaluator.ask_if_due(self._position.step, self._published)
        self._keeper.keep(self._position)
        self._evaluator.wait()
        self._reports.late(self._evaluator.fresh())
        self._conclude()

    def _train(self, feeder: Feeder) -> None:
        learner, reports = self._config.learner, self._reports
        ended, cpu, blocked_s = time.perf_counter(), time.process_time(), 0.0
        for _ in range(self._position.step, learner.steps):
            waiting = time.perf_counter()
            try:
                with self._progress.phase("waiting for groups"):
                    batch = feeder.next_batch()
            except RunFinished:
                return
            wait_s = time.perf_counter() - waiting
            figures = self._trainer.step(batch.rows, batch.rollouts)
            step_s, cpu_s = time.perf_counter() - ended, time.process_time() - cpu
            times = StepTimes(wait_s, step_s, cpu_s, publish_blocked_ms=blocked_s * 1e3)
            ended, cpu = ended + step_s, cpu + cpu_s
            tokens = batch.tally.tokens + reports.num_tokens
            record = StepRecord(
                batch.step, batch.version + 1, batch.tally, figures, times, tokens, self._evaluator.fresh()
            )
            self._position = feeder.trained(batch, record.report(self._publisher.in_flight))
            reports.step(record, batch.samples)
            self._stop.release()
            blocked_s = self._publish() if batch.step % self._config.weight_sync.every == 0 else 0.0
            if batch.step < learner.steps:
                self._evaluator.ask_if_due(batch.step, self._published)
            reports.show(record, batch.samples, self._evaluator.records)
            self._keeper.keep_if_due(self._position)

    def _conclude(self) -> None:
        status = self._client.call(lambda queue: queue.status())
        # The figures first: a run that is finished is not entered again.
        self._reports.summarise(status, self._evaluator.records)
        self._client.call(lambda queue: queue.finish(self._position.session))
        self._reports.conclude(status)

    def _publish(self) -> float:
        """Hand the weights over; returns the seconds that this took."""
        version = self._position.version
        probe = Probe(self._probe_ids, self._trainer.score(self._probe_ids))
        with self._client.waiting(self._position.session, "publication"):
            blocked_s = self._publisher.publish(version, self._trainer.weights(), probe)
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
