"""Learns from conversations: `slipstream sft`.

Model, adapter, optimiser, precision, packing, ranks and checkpoints are the learner's own; the loss is the cross
entropy of the assistant's tokens. The order of the conversations follows from the seed, so a resumed training learns
what it would have learnt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from slipstream.learner import start
from slipstream.learner.algorithm.step_data import StepRollouts
from slipstream.learner.checkpoint_keeper import is_due
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from slipstream.learner.checkpoints.model_folder import Sources
from slipstream.learner.feed.demonstrations import Demonstrations, held_out, rows_of, taught_tokens
from slipstream.learner.feed.packing import PackedRow
from slipstream.learner.ranks import environment, launch
from slipstream.learner.ranks.stopping import LearnerFailed, Stop, Stopped
from slipstream.learner.report.journal import Journal, Record
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.run import build_trainer, sends_shares
from slipstream.learner.training.base import DivergedError, StepMetrics, Trainer
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.config.sections.algorithm import AlgorithmSection
from slipstream.protocol.demonstrations import Demonstration
from slipstream.weight_sync.weights import snapshot

METRICS = "metrics.jsonl"

# Added to the run's name: an RL run of the same file has a directory of its own.
SUFFIX = "-sft"

# The warm-up is one of so many steps.
WARMUP = 20

# Lines that the terminal shows of all steps.
SHOWN = 20


@dataclass(frozen=True)
class SupervisedRecord(Record):
    """One step, with TRL's names of metrics.

    Attributes:
        epoch: Passes over the conversations until then.
        loss: Mean cross entropy of the step's taught tokens, in nats, before the update.
        mean_token_accuracy: Share of them that greedy sampling would take.
        num_tokens: Taught tokens of the step.
        eval_loss: Mean cross entropy of the conversations that are held out, after the update; None where it was not
            measured.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"step_s": "step_time"}

    epoch: float
    num_tokens: int = 0
    loss: float | None = None
    mean_token_accuracy: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    step_s: float = 0.0
    eval_loss: float | None = None


def supervised(config: RunConfig, steps: int, learning_rate: float) -> RunConfig:
    """Return the run file as the trainer needs it for demonstrations: the algorithm's parts, which are of rewards, are
    the defaults, which load no second model."""
    plain = {name: of.default for name, of in AlgorithmSection.model_fields.items() if name != "router_aux_loss_coef"}
    schedule = {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}, "warmup_steps": steps // WARMUP}
    learner = config.learner.model_copy(
        update={
            **plain,
            **schedule,
            "learning_rate": learning_rate,
            "steps": steps,
            "epochs": None,
            "num_iterations": 1,
            "router_replay": False,
            "demonstrations_coef": 0.0,
        }
    )
    run = config.run.model_copy(update={"name": config.run.name + SUFFIX})
    return config.model_copy(update={"learner": learner, "run": run})


def train(
    config: RunConfig, conversations: Sequence[Demonstration], learning_rate: float, resume: bool = False
) -> Path:
    """Train `demonstrations.epochs` passes.

    Args:
        conversations: All of them, those that will be held out included.

    Returns:
        The model's folder.

    Raises:
        ConfigError: Before anything is changed.
        LearnerFailed: A step cannot be trained, or the model not be written.
        SystemExit: With 130 or 143 after Ctrl-C or SIGTERM.
    """
    section = config.demonstrations
    taught, kept = held_out(conversations, section.eval_share, config.run.seed)
    demonstrations = Demonstrations(taught, section.batch_size, config.run.seed, section.epochs)
    ignored = environment.check_environment(os.environ)
    environment.clear(os.environ)
    config = supervised(config, demonstrations.steps, learning_rate)
    place = launch.this_rank(config)
    if place.launched and place.count > 1:
        raise ConfigError("slipstream sft starts its ranks itself: set learner.ranks, and start it without a launcher")
    config = start.with_served_dtype(launch.with_world_size(config, place), torch.cuda.is_available())
    checkpoint = _beginning(config, resume)
    transformers_logging.disable_progress_bar()
    with Stop(config.deploy.grace_s) as stop, TerminalProgress(config.learner.steps) as progress, ExitStack() as ranks:
        for variable in ignored:
            progress.warn(variable)
        with progress.phase(f"loading the model {config.model.path}"):
            team = ranks.enter_context(launch.lead_team(config, place, stop, progress.warn))
            trainer = build_trainer(config, checkpoint, team)
        if sends_shares(config, team):  # the other ranks make their share of the weights, which takes all of them
            snapshot.expect(trainer.share(), trainer.policy.precision.servers)
        if trainer.policy.adapter is not None:
            progress.say(f"lora.r = {config.lora.r}: {trainer.policy.adapter.trained:,} weights train, of an adapter")
        return _Training(config, trainer, demonstrations, kept, progress, stop, checkpoint).run()


def _beginning(config: RunConfig, resume: bool) -> Checkpoint | None:
    """Return the checkpoint to continue from; None for the initial model. Raises `ConfigError`."""
    found = checkpoints.latest(config.run_dir)
    if found is not None and not resume:
        raise ConfigError(
            f"{config.run_dir} holds a checkpoint of step {found.info.step}: continue from it with --resume, or choose "
            f"another run.name"
        )
    if resume and found is None:
        raise ConfigError(f"--resume: {config.run_dir} holds no checkpoint; start without --resume")
    return found


class _Training:
    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        demonstrations: Demonstrations,
        kept: Sequence[Demonstration],
        progress: TerminalProgress,
        stop: Stop,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._demonstrations = demonstrations
        self._kept = kept
        self._progress = progress
        self._stop = stop
        self._settings = start.settings(config)
        self._newest = checkpoint
        self._step = 0 if checkpoint is None else checkpoint.info.step
        self._saved_at = time.monotonic()

    def run(self) -> Path:
        config, steps = self._config, self._config.learner.steps
        sources = Sources(config.model, config.chat.template)
        self._trainer.guard(self._stop)
        self._trainer.before_change(self._stop.hold)
        checkpoints.try_files(config.run_dir, self._trainer, sources)
        kept = -1 if self._newest is None else self._step  # lines of a start that wrote no checkpoint go
        journal = Journal(config.run_dir / METRICS, SupervisedRecord, kept, self._progress.warn)
        if self._newest is None:
            self._show(SupervisedRecord(0, 0.0, eval_loss=self._eval_loss()), journal)
        else:
            self._progress.say(f"resuming from step {self._step} of {steps}: {self._newest.path}")
            if changed := start.changed(config, self._newest.info):
                self._progress.warn(f"changed since that checkpoint, and used from here on: {', '.join(changed)}")
        try:
            while self._step < steps:
                began = time.monotonic()
                self._learn(self._step + 1, journal)
                now = time.monotonic()
                due = is_due(config.learner, self._step, now - self._saved_at, now - began)
                if due or self._step == steps:
                    self._save(sources)
        except Stopped as stopped:
            if not stopped.halfway and self._step > (0 if self._newest is None else self._newest.info.step):
                try:
                    self._write(sources)
                except checkpoints.CheckpointError as error:
                    self._progress.warn(str(error))
            newest = self._newest
            how = f"begin again with: {start.command()}"
            if newest is not None:
                how = f"continue from step {newest.info.step} with: {start.resume_command()}"
            self._progress.say(f"stopped after step {self._step}; {how}", whole=True)
            raise
        assert self._newest is not None
        return self._newest.model_path

    def _learn(self, step: int, journal: Journal[SupervisedRecord]) -> None:
        config, form = self._config, self._trainer.batch_form
        batch = self._demonstrations.of_step(step)
        rows = rows_of(batch, 1.0, config.learner.token_budget, form.branches, config.learner.ranks)
        metrics = self._trained(step, [row.pinned() for row in rows] if form.pin else rows)
        self._step = step
        ended = self._demonstrations.epoch_after(step)
        of_epoch = int(ended) > int(self._demonstrations.epoch_after(step - 1)) or step == config.learner.steps
        record = SupervisedRecord(
            step=step,
            epoch=ended,
            num_tokens=sum(taught_tokens(batch)),
            loss=metrics.beside["demonstrations/loss"],
            mean_token_accuracy=metrics.beside["demonstrations/mean_token_accuracy"],
            grad_norm=metrics.grad_norm,
            learning_rate=metrics.learning_rate,
            step_s=metrics.train_s,
            eval_loss=self._eval_loss() if of_epoch and not self._stop.asked else None,
        )
        self._show(record, journal)
        self._stop.release()

    def _trained(self, step: int, rows: Sequence[PackedRow]) -> StepMetrics:
        try:
            return self._trainer.step(rows, StepRollouts.none())
        except DivergedError as error:
            rate = self._config.learner.learning_rate
            raise LearnerFailed(
                f"step {step}: loss or gradient is not finite, and no weight was changed: lower "
                f"demonstrations.learning_rate = {rate:g}"
            ) from error
        except torch.OutOfMemoryError as error:
            raise LearnerFailed(
                f"step {step}: the device's memory does not hold a row of {max(row.tokens for row in rows)} tokens "
                f"({str(error).strip().partition(chr(10))[0]}): lower learner.token_budget and vllm.max_model_len, or "
                f"set learner.gradient_checkpointing = true"
            ) from error

    def _eval_loss(self) -> float | None:
        """Return the mean cross entropy of the taught tokens that are held out; None if none are."""
        losses = [
            -self._trainer.score(segment.token_ids.tolist())[segment.loss_mask[1:]]
            for conversation in self._kept
            for segment in conversation.segments
        ]
        return float(np.concatenate(losses).mean(dtype=np.float64)) if losses else None

    def _show(self, record: SupervisedRecord, journal: Journal[SupervisedRecord]) -> None:
        steps = self._config.learner.steps
        journal.append(record)
        if record.step in (0, 1, steps) or record.step % -(-steps // SHOWN) == 0 or record.eval_loss is not None:
            parts = [f"step {record.step:>{len(str(steps))}}/{steps}", f"epoch {record.epoch:.2f}"]
            if record.loss is not None:
                parts += [f"loss {record.loss:.4f}", f"accuracy {record.mean_token_accuracy:.3f}"]
                parts += [f"{record.num_tokens / record.step_s:,.0f} taught tokens/s"]
            if record.eval_loss is not None:
                parts.append(f"held-out loss {record.eval_loss:.4f}")
            self._progress.say(" | ".join(parts))

    def _save(self, sources: Sources) -> None:
        with self._stop.finishing():
            self._write(sources)
        self._saved_at = time.monotonic()

    def _write(self, sources: Sources) -> None:
        config, step = self._config, self._step
        info = CheckpointInfo(step, step, self._settings)
        with self._progress.phase(f"writing the checkpoint of step {step}"):
            self._newest = checkpoints.save(
                config.run_dir, info, self._trainer, sources, config.learner.keep_checkpoints
            )
