"""The learner's loop: lease, train, acknowledge, publish, checkpoint.

A version is acknowledged at the queue before anyone can see it and before a checkpoint holds it: so no version number
is ever used twice, whichever process dies. SIGTERM and Ctrl-C end the loop at once, without a checkpoint; leases are
given back, and `resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import set_seed
from transformers.utils import logging as transformers_logging

from learner import checkpoint as checkpoints
from learner.blocking_client import BlockingQueueClient
from learner.checkpoint import Checkpoint, CheckpointInfo
from learner.feed.feeder import Feeder
from learner.model.policy import Scoring, load_policy
from learner.report import summary
from learner.report.journal import Journal, newest_version
from learner.report.progress import Progress
from learner.report.record import PublicationRecord, StepRecord, StepTimes
from learner.report.rollouts import RolloutLog
from learner.trainer import Trainer
from protocol.client import QueueClient, RunFinished
from protocol.config import ConfigError, RunConfig
from protocol.messages import BeginSession
from protocol.rollouts import FILE_NAME as ROLLOUTS
from weight_sync.probe import Probe, probe_token_ids
from weight_sync.publisher import Publisher


def run(config: RunConfig, queue_url: str | None = None, resume: bool = False) -> None:
    """Train `config.learner.steps` steps. Raises `ConfigError` before anything is started or changed."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(
            f"WORLD_SIZE = {ranks}: the learner trains on one rank only; start it with accelerate launch "
            f"--num_processes 1, or with: slipstream learner run.toml"
        )
    # The progress bar of each checkpoint would run through the live line.
    transformers_logging.disable_progress_bar()
    checkpoint = starting_point(config, resume)
    trainer = build_trainer(config, checkpoint)
    url = queue_url or config.queue.url
    with (
        _sigterm_as_exit(),
        BlockingQueueClient(QueueClient(url, config.token)) as client,
        Publisher(config, url) as publisher,
    ):
        Loop(config, trainer, client, publisher).run(checkpoint, resume)


def starting_point(config: RunConfig, resume: bool) -> Checkpoint | None:
    """The checkpoint to start from; None for the initial model, also where a run to resume has no checkpoint yet."""
    checkpoint = checkpoints.latest(config.run_dir)
    if checkpoint is not None and not resume:
        raise ConfigError(
            f"run.name = {config.run.name}: {checkpoint.path} holds a checkpoint already; go on from it with "
            f"--resume, or choose another run.name"
        )
    return checkpoint


def build_trainer(config: RunConfig, checkpoint: Checkpoint | None) -> Trainer:
    set_seed(config.run.seed)
    path = str(checkpoint.model_path) if checkpoint else config.model.path
    scoring = Scoring(config.rollout.temperature, config.learner.logprob_chunk_tokens)
    trainer = Trainer(load_policy(path, config.model, scoring), config.learner)
    if checkpoint is not None:
        checkpoints.restore(checkpoint, trainer)
    return trainer


class Loop:
    """One session of the learner at the queue."""

    def __init__(self, config: RunConfig, trainer: Trainer, client: BlockingQueueClient, publisher: Publisher) -> None:
        self._config = config
        self._trainer = trainer
        self._client = client
        self._publisher = publisher
        self._recorded = 0
        self._probe_ids = probe_token_ids(trainer.policy.vocabulary_size)

    def run(self, checkpoint: Checkpoint | None, resume: bool) -> None:
        config = self._config
        done = checkpoint.info if checkpoint else CheckpointInfo(step=0, version=0)
        # The queue may have lost its store, and the steps since the checkpoint made versions that servers know.
        version = max(done.version, newest_version(config.run_dir / "metrics.jsonl")) if resume else 0
        begin = BeginSession(done.step, version, config.learner.steps, resume)
        self._position = self._client.call(lambda queue: queue.begin_session(begin))
        self._publisher.session = self._position.session
        self._checkpointed = done.step if checkpoint else None
        self._steps = Journal(config.run_dir / "metrics.jsonl", StepRecord, done.step)
        self._publications = Journal(config.run_dir / "publications.jsonl", PublicationRecord, done.step)
        self._rollouts = RolloutLog(config.run_dir / ROLLOUTS, done.step)
        progress = Progress(config.learner.steps, lambda: self._client.call(lambda queue: queue.status()))
        progress.say(f"publishing version {self._position.version} as soon as the vLLM servers are up")
        self._publish()
        self._finish_publication()
        with progress, Feeder(config, self._client, self._position) as feeder:
            self._train(feeder, progress)
        if self._published != self._position.version:
            self._publish()
        self._finish_publication()
        if self._checkpointed != self._position.step:
            self._checkpoint()
        status = self._client.call(lambda queue: queue.status())
        self._client.call(lambda queue: queue.finish(self._position.session))
        result = summary.summarise(self._steps.records, self._publications.records, status)
        summary.write(config.run_dir, result, self._steps.records)
        rewards = [record.tally.reward_mean for record in self._steps.records]
        progress.say(f"reward {summary.sparkline(rewards)}")
        progress.say(f"figures in {config.run_dir / 'summary.json'}, the curve in reward.png beside it")

    def _train(self, feeder: Feeder, progress: Progress) -> None:
        learner = self._config.learner
        ended, cpu, blocked_s = time.perf_counter(), time.process_time(), 0.0
        for _ in range(self._position.step, learner.steps):
            waiting = time.perf_counter()
            try:
                batch = feeder.next_batch()
            except RunFinished:
                return
            wait_s = time.perf_counter() - waiting
            figures = self._trainer.step(batch.rows, batch.tally.tokens_trained)
            step_s, cpu_s = time.perf_counter() - ended, time.process_time() - cpu
            times = StepTimes(wait_s, step_s, cpu_s, publish_blocked_ms=blocked_s * 1e3)
            ended, cpu = ended + step_s, cpu + cpu_s
            tokens = batch.tally.tokens + (self._steps.records[-1].num_tokens if self._steps.records else 0)
            record = StepRecord(batch.step, batch.version + 1, batch.tally, figures, times, num_tokens=tokens)
            self._position = feeder.trained(batch, record.report(self._publisher.in_flight))
            self._steps.append(record)
            self._rollouts.append(batch.samples[: learner.sample_rollouts])
            blocked_s = self._publish() if batch.step % self._config.weight_sync.every == 0 else 0.0
            progress.show(record)
            if learner.checkpoint_every and batch.step % learner.checkpoint_every == 0:
                self._checkpoint()

    def _publish(self) -> float:
        """Hand the weights over; returns the seconds that this took."""
        policy, version = self._trainer.policy, self._position.version
        probe = Probe(self._probe_ids, policy.score(self._probe_ids))
        with self._client.waiting(self._position.session, "publication"):
            blocked_s = self._publisher.publish(version, policy.named_weights(), probe)
        self._published = version
        self._record_publications()
        return blocked_s

    def _finish_publication(self) -> None:
        with self._client.waiting(self._position.session, "publication"):
            self._publisher.wait()
        self._record_publications()

    def _record_publications(self) -> None:
        offset = self._position.version - self._position.step
        ended = self._publisher.records[self._recorded :]
        for publication in ended:
            self._publications.append(PublicationRecord(publication.version - offset, publication))
        self._recorded += len(ended)

    def _checkpoint(self) -> None:
        info = CheckpointInfo(self._position.step, self._position.version)
        keep = self._config.learner.keep_checkpoints
        checkpoints.save(self._config.run_dir, info, self._trainer, self._config.model.path, keep)
        self._client.call(lambda queue: queue.checkpointed(self._position.session, info.step))
        self._checkpointed = info.step


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that leases are given back and threads end; exit code 143."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
