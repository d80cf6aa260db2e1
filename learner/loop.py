"""The learner's loop: lease, train, acknowledge, publish, checkpoint.

A version is acknowledged at the queue before anyone can see it and before a checkpoint holds it: so no version number
is ever used twice, whichever process dies. SIGTERM and Ctrl-C abandon the step, unless its weights change already: then
they wait until it is acknowledged. Leases are given back, and a checkpoint is written if the grace time allows.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

from accelerate.utils import set_seed
from transformers.utils import logging as transformers_logging

from learner import checkpoint as checkpoints
from learner import evaluations, start
from learner.blocking_client import BlockingQueueClient
from learner.checkpoint import Checkpoint, CheckpointInfo
from learner.evaluations import Evaluator
from learner.feed.feeder import Feeder
from learner.model.policy import Scoring, load_policy
from learner.model.precision import warning
from learner.model.reference import load_reference
from learner.report import sampler_kl, summary
from learner.report.curve import Curve, sparkline
from learner.report.journal import Journal
from learner.report.progress import Progress
from learner.report.record import PublicationRecord, StepRecord, StepTimes
from learner.report.rollouts import RolloutLog
from learner.report.watch import Watch
from learner.stopping import Stop, Stopped
from learner.trainer import StepFigures, Trainer
from protocol.client import QueueClient, QueueError, RunFinished
from protocol.config import ConfigError, RunConfig
from protocol.config.algorithm import doubts
from protocol.rollouts import FILE_NAME as ROLLOUTS
from weight_sync.probe import Probe, probe_token_ids
from weight_sync.publisher import Publisher

# A checkpoint may take this much longer than the one before.
CHECKPOINT_MARGIN = 1.5
REPORT_TIMEOUT_S = 5.0
# What a disk surely writes in a second, before a checkpoint was timed.
DISK_BYTES_PER_S = 50e6


def run(config: RunConfig, queue_url: str | None = None, resume: bool = False) -> None:
    """Train `config.learner.steps` steps. Raises `ConfigError` before anything is changed; `SystemExit` with 130 or 143
    after Ctrl-C or SIGTERM."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(
            f"WORLD_SIZE = {ranks}: the learner trains on one rank only; start it with accelerate launch "
            f"--num_processes 1, or with: slipstream learner run.toml"
        )
    if config.learner.epochs is not None:
        raise ConfigError(
            f"learner.epochs = {config.learner.epochs:g}: this learner does not load the data set, and so cannot count "
            f"its rows; start it with: slipstream learner run.toml, or give learner.steps"
        )
    # The progress bar of each checkpoint would run through the live line.
    transformers_logging.disable_progress_bar()
    url = queue_url or config.queue.url
    accepted = config.rollout.accept_sampler_mismatch
    progress = Progress(config.learner.steps, config.learner.groups_per_step, show_sampler_kl=accepted)
    with (
        Stop(config.deploy.grace_s) as stop,
        BlockingQueueClient(QueueClient(url, config.token)) as client,
        progress,
        Watch(client, progress),
    ):
        checkpoint = start.starting_point(config, resume)
        try:
            if resume:
                with progress.phase("waiting for the queue"):
                    position = client.call(lambda queue: queue.position())
                if start.is_over(config, checkpoint, position):
                    progress.say(f"{config.run.name} is finished: it has made all of its {config.learner.steps} steps")
                    return
                for line in start.introduction(config, checkpoint, position):
                    progress.say(line)
            progress.say(start.algorithm(config.learner))
            for doubt in doubts(config.learner):
                progress.warn(doubt)
            with progress.phase(f"loading the model {config.model.path}"):
                trainer = build_trainer(config, checkpoint)
            policy = trainer.policy
            if text := warning(policy.precision, policy.named_weights(), config.learner.learning_rate):
                progress.warn(text)
        except Stopped:
            progress.say(f"stopped before it began; start it again with: {start.command()}", whole=True)
            raise
        with Publisher(config, url) as publisher:
            Loop(config, trainer, client, publisher, progress, stop).run(checkpoint, resume)


def build_trainer(config: RunConfig, checkpoint: Checkpoint | None) -> Trainer:
    set_seed(config.run.seed)
    path = str(checkpoint.model_path) if checkpoint else config.model.path
    learner = config.learner
    scoring = Scoring(config.rollout.temperature, learner.logits_mib, learner.router_aux_loss_coef > 0)
    policy = load_policy(path, config.model, scoring, learner, longest=config.vllm.max_model_len)
    reference = load_reference(config, scoring)
    trainer = Trainer(policy, learner, config.rollout.max_episode_tokens, reference)
    if checkpoint is not None:
        checkpoints.restore(checkpoint, trainer)
    return trainer


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
        self._warns_of_sampler = not config.rollout.accept_sampler_mismatch
        self._checkpoint_s: float | None = None
        self._probe_ids = probe_token_ids(trainer.policy.vocabulary_size)
        # torch calls it right before weights change.
        trainer.optimiser.optimizer.register_step_pre_hook(lambda *_: stop.hold())

    def run(self, checkpoint: Checkpoint | None, resume: bool) -> None:
        """Train to the last step. Raises `QueueError`, `PublishError`, `DivergedError`, `Stopped`."""
        config = self._config
        begin = start.session(config, checkpoint, resume, self._trainer.policy.vocabulary_size)
        with self._progress.phase("waiting for the queue"):
            self._position = self._client.call(lambda queue: queue.begin_session(begin))
        self._publisher.session = self._position.session
        self._checkpointed = begin.step if checkpoint else None
        self._steps = Journal(config.run_dir / "metrics.jsonl", StepRecord, begin.step)
        self._publications = Journal(config.run_dir / "publications.jsonl", PublicationRecord, begin.step)
        self._rollouts = RolloutLog(config.run_dir / ROLLOUTS, begin.step)
        self._curve = Curve(config.run_dir / "reward.png")
        journal = evaluations.journal_of(config, begin.step)
        self._evaluator = Evaluator(config, self._client, self._position.session, journal, self._progress)
        try:
            self._run_session()
        except Stopped as stopped:
            self._leave(stopped.halfway)
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
            self._publisher.on_failure = feeder.fail
            self._train(feeder)
        with self._progress.phase(f"publishing version {self._position.version}"):
            if self._published != self._position.version:
                self._publish()
            self._finish_publication()
        if self._position.step == self._config.learner.steps:  # after the publication, to see the last weights
            self._evaluator.ask_if_due(self._position.step, self._published)
        if self._checkpointed != self._position.step:
            self._checkpoint()
        self._evaluator.wait()
        if late := self._evaluator.fresh():
            self._steps.amend(late)
        self._conclude()

    def _train(self, feeder: Feeder) -> None:
        learner = self._config.learner
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
            tokens = batch.tally.tokens + (self._steps.records[-1].num_tokens if self._steps.records else 0)
            record = StepRecord(
                batch.step, batch.version + 1, batch.tally, figures, times, tokens, self._evaluator.fresh()
            )
            self._position = feeder.trained(batch, record.report(self._publisher.in_flight))
            self._steps.append(record)
            self._rollouts.append(batch.samples[: learner.sample_rollouts])
            self._stop.release()
            blocked_s = self._publish() if batch.step % self._config.weight_sync.every == 0 else 0.0
            if batch.step < learner.steps:
                self._evaluator.ask_if_due(batch.step, self._published)
            self._progress.show(record)
            self._warn_of_sampler(figures)
            if batch.samples and learner.show_rollout_every and batch.step % learner.show_rollout_every == 0:
                self._progress.show_rollout(batch.samples[0])
            self._curve.grow(self._steps.records, self._evaluator.records)
            if learner.checkpoint_every and batch.step % learner.checkpoint_every == 0:
                self._checkpoint()

    def _warn_of_sampler(self, figures: StepFigures) -> None:
        """Once in a session."""
        if self._warns_of_sampler and (text := sampler_kl.warning(figures)):
            self._progress.warn(text)
            self._warns_of_sampler = False

    def _conclude(self) -> None:
        config, records = self._config, self._steps.records
        status = self._client.call(lambda queue: queue.status())
        # The figures first: a run that is finished is not entered again.
        summary.write(
            config.run_dir, summary.summarise(records, self._publications.records, status, self._evaluator.records)
        )
        self._curve.finish(records, self._evaluator.records)
        self._client.call(lambda queue: queue.finish(self._position.session))
        rewards = [record.tally.reward_mean for record in records]
        self._progress.say(f"reward {sparkline(rewards, min(60, self._progress.console.width - 7))}")
        lost = sorted(status.drops.items(), key=lambda drop: -drop[1])
        self._progress.say(f"groups: {status.ledger.trained} trained{''.join(f', {n} {why}' for why, n in lost)}")
        self._progress.say(f"figures in {config.run_dir / 'summary.json'}, the curve in reward.png beside it")

    def _leave(self, halfway: bool) -> None:
        """After a signal: a checkpoint if there is time, and how to go on. `halfway`: the weights hold a step that the
        queue has not acknowledged."""
        say, step, told = self._progress.say, self._position.step, f"stopped after step {self._position.step}"
        expected_s, left_s = self._expected_checkpoint_s(), self._stop.left_s
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
            self._last_checkpoint()
        if step == 0:
            say(f"start it again with: {start.command()}", whole=True)
        elif self._checkpointed is None:
            say(f"there is no checkpoint: begin again at the first step with: {start.resume_command()}", whole=True)
        elif self._checkpointed < self._config.learner.steps:
            say(f"go on from step {self._checkpointed} with: {start.resume_command()}", whole=True)
        else:
            say(f"all steps are done; end the run with: {start.resume_command()}", whole=True)

    def _last_checkpoint(self) -> None:
        try:
            info = self._save()
        except OSError as error:
            self._progress.warn(f"the checkpoint could not be written: {error}")
            return
        # A queue that does not hear of it now will when the run is resumed.
        with suppress(QueueError, TimeoutError):
            session = self._position.session
            self._client.call(lambda queue: asyncio.wait_for(queue.checkpointed(session, info.step), REPORT_TIMEOUT_S))

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
        info = self._save()
        self._client.call(lambda queue: queue.checkpointed(self._position.session, info.step))

    def _save(self) -> CheckpointInfo:
        began = time.monotonic()
        config = self._config
        info = CheckpointInfo(self._position.step, self._position.version, start.settings(config))
        keep = config.learner.keep_checkpoints
        sources = checkpoints.Sources(config.model, config.chat.template)
        checkpoints.save(config.run_dir, info, self._trainer, sources, keep)
        self._checkpointed, self._checkpoint_s = info.step, time.monotonic() - began
        return info

    def _expected_checkpoint_s(self) -> float:
        if self._checkpoint_s is not None:
            return CHECKPOINT_MARGIN * self._checkpoint_s
        weights = sum(weight.numel() * weight.element_size() for _, weight in self._trainer.policy.named_weights())
        copies = 3 + (self._config.learner.reference_sync_steps > 0)  # AdamW has two figures for each weight
        return copies * weights / DISK_BYTES_PER_S
