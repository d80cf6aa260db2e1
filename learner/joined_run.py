"""`slipstream.join`: the door for a trainer of one's own.

It leases judged batches, acknowledges the steps that were made of them, and publishes weights. Model, loss, optimiser
and checkpoints are the caller's.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from slipstream.learner import start
from slipstream.learner.algorithm.step_data import NORMALISERS
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints.checkpoint import CheckpointInfo
from slipstream.learner.evaluator import Evaluator, open_eval_journal
from slipstream.learner.feed.blocking_client import BlockingQueueClient
from slipstream.learner.feed.feeder import Feeder
from slipstream.learner.feed.step_draft import Batch
from slipstream.learner.feed.token_batch import TokenBatch
from slipstream.learner.queue_session import QueueSession
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.queue_status import Watch
from slipstream.learner.report.records import StepRecord, StepTimes
from slipstream.learner.report.reports import Reports
from slipstream.learner.training.base import StepMetrics
from slipstream.protocol import access, reasons
from slipstream.protocol.client import QueueClient, RunFinished
from slipstream.protocol.config import ConfigError, RunConfig, load
from slipstream.weight_sync.own_servers import vocabulary_size
from slipstream.weight_sync.publisher import Publisher, PublishError
from slipstream.weight_sync.weights.snapshot import NamedWeights, Score, pairs

# Metrics of a step with their own place in `metrics.jsonl`.
_OWN_PLACE = ("loss", "grad_norm", "learning_rate", "entropy")


def join(
    run: str | Path | RunConfig | None = None,
    *settings: str,
    queue: str | None = None,
    step: int = 0,
    resume: bool | None = None,
) -> Run:
    """Join a run as its trainer.

        with slipstream.join("run.toml") as run:
            run.publish(model.named_parameters(), score)
            for batch in run.batches():
                ...
                run.commit(batch, {"loss": loss.item()})
                run.publish(model.named_parameters(), score)

    Queue, workers and vLLM servers are those of `slipstream up run.toml`, which starts the trainer too where
    `learner.script` names its file.

    Args:
        run: Path of the run file, or what `slipstream.protocol.config.load` made of it. None: the script's command line
            says it, `script.py run.toml [--queue URL] [--resume] [--section.key value]`.
        settings: `"--section.key", "value"`, over those of the run file.
        queue: URL of the queue; by default the run file's.
        step: The step of the caller's own checkpoint to continue from; 0 without one.
        resume: Whether the run continues. By default it does where `step` is above 0, or the command line says so.

    Returns:
        The run. Enter it with `with`: leaving the block without an exception ends the run; with one the run can be
        resumed.

    Raises:
        ConfigError: A setting is wrong, or asks for what only Slipstream's own learner does.
    """
    if run is None:
        given, rest = _parser().parse_known_args()
        run, settings, queue = given.run_file, (*rest, *settings), queue or given.queue
        resume = given.resume if resume is None else resume
    config = run if isinstance(run, RunConfig) else load(run, list(settings), needs=["model", "chat"])
    access.hide_token()
    config = start.with_served_dtype(config, torch.cuda.is_available())
    _check(config)
    return Run(config, queue or config.queue.address, step, bool(step) if resume is None else resume)


@dataclass
class _Step:
    """The batch that was given out last.

    Attributes:
        wait_s: Seconds until it came.
        trains_from: When it came, of `time.perf_counter`.
        number: The `TokenBatch.number` under which it was given out.
        ended: Whether it was committed or skipped.
    """

    batch: Batch
    feeder: Feeder
    wait_s: float
    trains_from: float
    number: int
    ended: bool = False


class Run:
    """A run that was joined with `slipstream.join`.

    Attributes:
        config: The run's settings.
        run_dir: Folder of the run, for checkpoints and logs. `metrics.jsonl` in it gets a line for each step.
    """

    def __init__(
        self,
        config: RunConfig,
        queue_url: str,
        step: int = 0,
        resume: bool = False,
        make_publisher: Callable[[RunConfig, str], Publisher] = Publisher,
    ) -> None:
        self.config = config
        self._make_publisher = make_publisher
        self.run_dir = config.run_dir
        self._url, self._from_step, self._resume = queue_url, step, resume
        self._open = ExitStack()
        self._session: QueueSession | None = None
        self._given: Generator[TokenBatch, None, None] | None = None
        self._current: _Step | None = None
        self._numbered = 0
        self._blocked_s = 0.0

    def __enter__(self) -> Self:
        if self._session is not None:
            raise RuntimeError("the run was joined already: call slipstream.join() again for another session")
        config = self.config
        with ExitStack() as opened:
            self._progress = opened.enter_context(
                TerminalProgress(config.learner.steps, config.learner.groups_per_step)
            )
            self._client = opened.enter_context(
                BlockingQueueClient(QueueClient(self._url, config.token_for("learner")))
            )
            opened.enter_context(Watch(self._client, self._progress))
            self._publisher = opened.enter_context(self._make_publisher(config, self._url))
            vocabulary = vocabulary_size(config.model)
            begin = start.session(config, CheckpointInfo(self._from_step, 0), self._resume, vocabulary)
            with self._progress.phase("waiting for the queue"):
                self._session = QueueSession(config, self._client, self._publisher, begin, vocabulary)
            checkpoints.set_aside(config.run_dir, self._from_step)
            self._reports = Reports(config, self._from_step, self._progress)
            journal = open_eval_journal(config, self._from_step)
            self._evaluator = Evaluator(config, self._client, self._queue.position.session, journal, self._progress)
            self._ended, self._cpu = time.perf_counter(), time.process_time()
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            if self._given is not None:
                self._given.close()
            if error is None:
                self._finish()
            self._reports.close()

    @property
    def step(self) -> int:
        """Number of steps that were made."""
        return self._queue.position.step

    @property
    def version(self) -> int:
        """Version of the weights that the newest step made."""
        return self._queue.position.version

    def batches(self) -> Iterator[TokenBatch]:
        """Yield the batch of each step, until `learner.steps` are made or the run is finished.

        A batch holds `learner.groups_per_step` groups within `queue.max_staleness`. Commit or skip it before the next.
        An earlier iterator of the run ends, and gives back the batch that it yielded last.

        Raises:
            QueueError: The queue refuses, cannot be reached, or no group comes for `learner.stall_timeout_s`.
            PublishError: No server can be given the weights.
            RuntimeError: Nothing was published yet, or the last batch was neither committed nor skipped.
        """
        if self._queue.published is None:
            raise RuntimeError("nothing is published yet, so no server samples: call publish() before batches()")
        if self._given is not None:
            self._given.close()
        try:
            self._queue.wait_published()
        except PublishError as error:
            if "log-probs" not in str(error) or self._publisher.records:
                raise
            asked = "does score() return the log-probs at temperature 1 of the tokens after the first?"
            raise PublishError(f"{asked} {error}") from None
        if self.step == 0:
            self._evaluator.wait_for_first()
        self._current = None
        self._given = self._batches()
        return self._given

    def _batches(self) -> Generator[TokenBatch, None, None]:
        with self._queue.feeding(branches=False) as feeder:
            while self.step < self.config.learner.steps:
                if self._current is not None and not self._current.ended:
                    raise RuntimeError(
                        f"step {self._current.batch.step}: the batch was neither committed nor skipped: call commit() "
                        f"or skip() before the next batch"
                    )
                began = time.perf_counter()
                try:
                    with self._progress.phase("waiting for groups"):
                        batch = feeder.next_batch()
                except RunFinished:
                    return
                came = time.perf_counter()
                self._numbered += 1
                self._current = _Step(batch, feeder, came - began, came, self._numbered)
                yield self._tokens(batch)

    def commit(self, batch: TokenBatch, metrics: Mapping[str, float] | None = None) -> None:
        """Tell the queue that a batch was trained. From here on its version is taken.

        Call it after the optimiser's step, and before `publish` and any checkpoint of the step.

        Args:
            metrics: For `metrics.jsonl`, the status page and trackers. `loss`, `grad_norm`, `learning_rate` and
                `entropy` are shown by these names.

        Raises:
            QueueError: The queue disagrees: another learner works on this run.
            ValueError: A metric is no number.
        """
        current = self._take(batch)
        given = {str(name): _number(name, value) for name, value in (metrics or {}).items()}
        loss, grad_norm, rate, entropy = (given.pop(name, None) for name in _OWN_PLACE)
        now, cpu = time.perf_counter(), time.process_time()
        step_s, cpu_s, self._ended, self._cpu = now - self._ended, cpu - self._cpu, now, cpu
        of = current.batch
        self._record_publications()
        record = StepRecord(
            step=of.step,
            version=of.version + 1,
            counts=of.counts,
            metrics=StepMetrics(loss, entropy, grad_norm, rate, train_s=now - current.trains_from, beside=given),
            times=StepTimes(current.wait_s, step_s, cpu_s, self._blocked_s * 1e3),
            num_tokens=of.counts.tokens + self._reports.num_tokens,
            evaluations=self._evaluator.fresh(),
            weight_sync=self._reports.weight_sync(),
        )
        self._queue.acknowledge(current.feeder, of, record.report(self._publisher.in_flight))
        current.ended, self._blocked_s = True, 0.0
        self._reports.step(record, of.samples)
        self._reports.show(record, of.samples, self._evaluator.records)

    def skip(self, batch: TokenBatch) -> None:
        """Leave out a batch that cannot be trained, as where its loss is not finite.

        The queue drops its groups, and the next batch is for the same step."""
        current = self._take(batch)
        current.feeder.leave_out(current.batch, reasons.STEP_NOT_FINITE)
        current.ended = True

    def publish(self, weights: NamedWeights, score: Score) -> None:
        """Give the newest weights to the vLLM servers, in the background.

        The weights are copied before it returns, so training may continue. A server serves them when its log-probs of a
        probe agree with `score`. It does nothing where `weight_sync.every` says that no publication is due; the first
        version and the last are always due.

        Args:
            weights: Names and tensors as in the model's checkpoint, such as `model.named_parameters()`.
            score: Scores a sequence under these weights, see `Score`.

        Raises:
            PublishError: No server can be given the weights.
            ValueError: The scores are not T - 1 finite numbers.
        """
        step, first = self.step, self._queue.published is None
        due = step % self.config.weight_sync.every == 0 or step == self.config.learner.steps
        if not first and (not due or self._queue.published == self.version):
            return
        self._blocked_s = self._queue.publish(
            score, lambda version, probe: self._publisher.publish(version, pairs(weights), probe)
        )
        self._record_publications()
        if first:
            self._evaluator.begin()
        self._evaluator.ask_if_due(step, self.version)

    def saved(self) -> None:
        """Say that a checkpoint of the newest step is on disk: the queue may forget what was trained before it.

        A run can be resumed from one of the `learner.keep_checkpoints` newest steps that were saved.
        """
        session, step = self._queue.position.session, self.step
        self._client.call(lambda queue: queue.checkpointed(session, step))

    @property
    def _queue(self) -> QueueSession:
        if self._session is None:
            raise RuntimeError("the run is not joined yet: enter it, as in `with slipstream.join(...) as run:`")
        return self._session

    def _take(self, batch: TokenBatch) -> _Step:
        current = self._current
        if current is None or current.ended or batch.number != current.number:
            raise RuntimeError(f"step {batch.step}: this is not the batch that batches() gave last, or it has ended")
        return current

    def _tokens(self, batch: Batch) -> TokenBatch:
        normaliser = NORMALISERS[self.config.learner.normaliser]
        return TokenBatch.of(
            batch.step,
            batch.version,
            batch.sequences,
            batch.rollouts.rewards,
            batch.advantages,
            normaliser(batch.rollouts, self.config.rollout.max_episode_tokens),
            number=self._numbered,
        )

    def _record_publications(self) -> None:
        self._reports.publications(self._publisher.records, self._queue.position)

    def _finish(self) -> None:
        if self.step < self.config.learner.steps:
            self._progress.warn(f"the trainer left after step {self.step} of {self.config.learner.steps}: the run ends")
        with self._progress.phase(f"publishing version {self.version}"):
            self._queue.wait_published()
        self._record_publications()
        self._evaluator.wait()
        self._reports.late(self._evaluator.fresh())
        status = self._client.call(lambda queue: queue.status())
        self._reports.summarise(status, self._evaluator.records)
        self._queue.finish()
        self._reports.conclude(status)


def _check(config: RunConfig) -> None:
    """Refuse settings that need Slipstream's own learner."""
    for setting, given in (
        ("images.enabled", config.images.enabled),
        ("learner.router_replay", config.learner.router_replay),
        ("learner.demonstrations_coef", config.learner.demonstrations_coef),
        ("rollout.top_k", config.rollout.top_k),
        ("lora.r", config.lora.r),
        ("learner.epochs", config.learner.epochs),
    ):
        if given:
            remedy = "give learner.steps" if setting == "learner.epochs" else "leave it out"
            raise ConfigError(f"{setting} = {given}: a trainer that joins does not see it; {remedy}")
    if int(os.environ.get("RANK", 0)):
        raise ConfigError(
            f"RANK = {os.environ['RANK']}: one process joins a run; let rank 0 join, and send its batches to the others"
        )


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"metrics[{name!r}] = {value}: give a finite number, or skip() a batch that cannot be trained")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name, usage="%(prog)s run.toml [options] [--section.key value ...]", allow_abbrev=False
    )
    parser.add_argument("run_file", metavar="run.toml")
    parser.add_argument("--queue", metavar="URL", help="URL of the queue, or of several, separated by commas")
    parser.add_argument("--resume", action="store_true", help="the run continues")
    return parser
