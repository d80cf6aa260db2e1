"""The learner's loop: lease, train, acknowledge, publish, checkpoint.

A version is taken (acknowledged at the queue) before anyone can see it, and before a checkpoint holds it: so no
version number is ever used twice, whatever dies when. SIGTERM and Ctrl-C end the loop at once, without a checkpoint;
leases are given back, and `resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from accelerate.utils import set_seed
from transformers.utils import logging as transformers_logging

from learner import checkpoint as checkpoints
from learner.blocking_client import BlockingQueueClient
from learner.checkpoint import Checkpoint, CheckpointInfo
from learner.feed.feeder import Feeder
from learner.feed.step_draft import Batch
from learner.model.policy import Scoring, load_policy
from learner.report import summary
from learner.report.journal import Journal, PublicationRecord, StepRecord
from learner.report.progress import Progress
from learner.trainer import StepFigures, Trainer
from protocol.client import QueueClient, RunFinished
from protocol.config import ConfigError, RunConfig
from protocol.messages import BeginSession, LearnerReport
from weight_sync.probe import Probe, probe_token_ids
from weight_sync.publisher import Publisher


def run(config: RunConfig, queue_url: str | None = None, resume: bool = False) -> None:
    """Train `config.learner.steps` steps. Raises `ConfigError` before anything is started or changed."""
    _refuse_several_ranks()
    # Its bars for every checkpoint would run through the live line.
    transformers_logging.disable_progress_bar()
    checkpoint = starting_point(config, resume)
    trainer = build_trainer(config, checkpoint)
    url = queue_url or config.queue.url
    with (
        _sigterm_as_exit(),
        BlockingQueueClient(QueueClient(url, config.token)) as link,
        Publisher(config, url) as publisher,
    ):
        Loop(config, trainer, link, publisher).run(checkpoint, resume)


def starting_point(config: RunConfig, resume: bool) -> Checkpoint | None:
    """The checkpoint to start from; None is the initial model, also where a resumed run has none yet."""
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
    """One session of the learner."""

    def __init__(self, config: RunConfig, trainer: Trainer, link: BlockingQueueClient, publisher: Publisher) -> None:
        self._config = config
        self._trainer = trainer
        self._link = link
        self._publisher = publisher
        self._recorded = 0
        self._probe_ids = probe_token_ids(trainer.policy.vocabulary_size)

    def run(self, checkpoint: Checkpoint | None, resume: bool) -> None:
        step = checkpoint.state.step if checkpoint else 0
        settings = self._config.learner
        begin = BeginSession(step, checkpoint.state.version if checkpoint else 0, settings.steps, resume)
        self._start = self._link.call(lambda client: client.begin_session(begin))
        self._state = CheckpointInfo(step, self._start.version)
        self._checkpointed = step if checkpoint else None
        self._steps = Journal(self._config.run_dir / "metrics.jsonl", StepRecord, step)
        self._publications = Journal(self._config.run_dir / "publications.jsonl", PublicationRecord, step)
        progress = Progress(settings.steps, lambda: self._link.call(lambda client: client.status()))
        progress.say(f"publishing version {self._state.version}, as soon as the vLLM servers are up")
        self._publish()
        self._finish_publication()
        with progress, Feeder(self._config, self._link, self._start) as feeder:
            self._train(feeder, progress)
        if self._published != self._state.version:
            self._publish()
        self._finish_publication()
        if self._checkpointed != self._state.step:
            self._checkpoint()
        status = self._link.call(lambda client: client.status())
        self._link.call(lambda client: client.finish())
        result = summary.summarise(self._steps.records, self._publications.records, status)
        summary.write(self._config.run_dir, result, self._steps.records)
        rewards = [record.reward_mean for record in self._steps.records]
        progress.say(f"reward {summary.sparkline(rewards)}")
        progress.say(f"figures in {self._config.run_dir / 'summary.json'}, the curve in reward.png beside it")

    def _train(self, feeder: Feeder, progress: Progress) -> None:
        settings = self._config.learner
        acknowledged, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._start.step, settings.steps):
            waiting = time.perf_counter()
            try:
                batch = feeder.next_batch()
            except RunFinished:
                return
            wait_s = time.perf_counter() - waiting
            figures = self._trainer.step(batch.rows, batch.tally.tokens_trained)
            step_s = time.perf_counter() - acknowledged
            feeder.trained(batch, _report(batch, wait_s, step_s, self._publisher.in_flight))
            acknowledged += step_s
            cpu_s, cpu = time.process_time() - cpu, time.process_time()
            self._state = CheckpointInfo(batch.step, batch.version + 1)

            blocked_s = self._publish() if batch.step % self._config.weight_sync.every == 0 else 0.0
            record = _record(batch, figures, wait_s, step_s, cpu_s, blocked_s, settings.token_budget)
            self._steps.append(record)
            progress.show(record)
            if settings.checkpoint_every and batch.step % settings.checkpoint_every == 0:
                self._checkpoint()

    def _publish(self) -> float:
        """Hand the weights over; returns the seconds that this took."""
        policy = self._trainer.policy
        probe = Probe(self._probe_ids, policy.score(self._probe_ids))
        with self._link.waiting(self._start.session, "publication"):
            blocked_s = self._publisher.publish(self._state.version, policy.named_weights(), probe)
        self._published = self._state.version
        self._record_publications()
        return blocked_s

    def _finish_publication(self) -> None:
        with self._link.waiting(self._start.session, "publication"):
            self._publisher.wait()
        self._record_publications()

    def _record_publications(self) -> None:
        offset = self._start.version - self._start.step
        ended = self._publisher.records[self._recorded :]
        for record in ended:
            self._publications.append(PublicationRecord(step=record.version - offset, **asdict(record)))
        self._recorded += len(ended)

    def _checkpoint(self) -> None:
        settings, state = self._config.learner, self._state
        checkpoints.save(self._config.run_dir, state, self._trainer, self._config.model.path, settings.keep_checkpoints)
        self._link.call(lambda client: client.checkpointed(self._start.session, state.step))
        self._checkpointed = state.step


def _report(batch: Batch, wait_s: float, step_s: float, publishing: int | None) -> LearnerReport:
    tally = batch.tally
    return LearnerReport(
        step=batch.step,
        reward_mean=_mean(tally.rewards),
        wait_s=wait_s,
        step_s=step_s,
        tokens_trained=tally.tokens_trained,
        staleness_mean=tally.staleness_sum / tally.tokens_trained,
        staleness_max=tally.staleness_max,
        publishing=publishing,
    )


def _record(
    batch: Batch,
    figures: StepFigures,
    wait_s: float,
    step_s: float,
    cpu_s: float,
    blocked_s: float,
    token_budget: int,
) -> StepRecord:
    tally = batch.tally
    return StepRecord(
        step=batch.step,
        version=batch.version + 1,
        reward_mean=_mean(tally.rewards),
        reward_std=_mean(tally.reward_stds),
        staleness_mean=tally.staleness_sum / tally.tokens_trained,
        staleness_max=tally.staleness_max,
        staleness_in_flight=_mean(tally.in_flight),
        staleness_in_queue=_mean(tally.in_queue),
        groups_trained=len(batch.ticket_ids),
        groups_dropped=dict(tally.groups_dropped),
        tokens_sampled=tally.tokens_sampled,
        tokens_trained=tally.tokens_trained,
        tokens_masked=dict(tally.tokens_masked),
        tokens_dropped=dict(tally.tokens_dropped),
        rollouts=len(tally.rewards),
        two_span_rollouts=tally.two_span_rollouts,
        rows=len(batch.rows),
        packing_fill=sum(row.tokens for row in batch.rows) / (len(batch.rows) * token_budget),
        wait_s=wait_s,
        step_s=step_s,
        cpu_s=cpu_s,
        publish_blocked_ms=blocked_s * 1e3,
        **asdict(figures),
    )


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


def _refuse_several_ranks() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(
            f"WORLD_SIZE = {ranks}: the learner trains on one rank only; start it with accelerate launch "
            f"--num_processes 1, or with: slipstream learner run.toml"
        )


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
