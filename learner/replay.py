"""`slipstream replay`: trains again from the record of what a run trained, without servers, queue or workers.

From the same model or checkpoint, with the same settings, device, threads and releases, each step gives the run's own
metrics and weights to the bit: its groups, their order and its version decide what a step trains on, and the record has
all three. One process makes the steps. Steps of several ranks, which add up in another order, agree except for
rounding.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import torch

from slipstream.learner import start
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from slipstream.learner.feed.step_draft import Batch, Draft, LeasedGroup
from slipstream.learner.report.journal import Journal
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.records import StepRecord, StepTimes
from slipstream.learner.run import build_trainer
from slipstream.learner.training.base import DivergedError, StepMetrics, Trainer
from slipstream.protocol import checkpoints as places
from slipstream.protocol import trained_record as records
from slipstream.protocol.config import ConfigError, RunConfig
from slipstream.protocol.demonstrations import Demonstration
from slipstream.protocol.trained_record import RecordedStep, RecordError, RecordPosition

METRICS, SUMMARY = "metrics.jsonl", "replay.json"
# Settings that a step's metrics may depend on.
_THAT_COUNT = (
    *("model.", "learner.", "lora.", "demonstrations.", "rollout.", "run.seed ", "vllm.max_model_len "),
    *("queue.max_staleness ", "queue.overage "),
)
# Metrics of a step on which two computations of it must agree.
COMPARED = tuple(field.name for field in fields(StepMetrics) if field.name not in ("train_s", *StepRecord.SPREAD))


@dataclass(frozen=True)
class Request:
    """One replay.

    Attributes:
        record: A record's folder, or one of its parts.
        out: A new folder for the results.
        from_step: Step of the checkpoint to begin with; 0 for the run's initial model; None for where the record
            begins.
        steps: Maximum number of steps.
    """

    record: Path
    out: Path
    from_step: int | None = None
    steps: int | None = None


class Outcome(msgspec.Struct):
    """The content of `replay.json`.

    Attributes:
        weights_sha256: SHA-256 over all weights after the last step, in the order of their names.
        compared: Steps that the run's own metrics.jsonl has too.
        first_difference: The first of them with another metric; None where all are the same to the bit.
        largest_difference: By metric.
        left_out: Outcome of each batch that the run left out.
        ranks: Number of ranks that made the run's steps.
    """

    record: str
    from_step: int
    steps: int
    weights_sha256: str
    compared: int
    first_difference: int | None
    largest_difference: dict[str, float]
    left_out: dict[str, str]
    ranks: int
    device: str
    threads: int
    torch: str


def replay(
    config: RunConfig, request: Request, progress: TerminalProgress, demonstrations: Sequence[Demonstration] = ()
) -> Outcome:
    """Replay a record.

    Args:
        demonstrations: The conversations of `learner.demonstrations_coef`.

    Raises:
        ConfigError: Before anything is written.
        DivergedError: A step that the run made cannot be made here.
    """
    if config.learner.epochs is not None:
        raise ConfigError(
            f"learner.epochs = {config.learner.epochs:g}: a replay does not load the data set, and so cannot count its "
            f"rows; give the run's own file, {config.run_file}, or learner.steps"
        )
    try:
        record = records.read_record(request.record)
    except RecordError as error:
        raise ConfigError(str(error)) from error
    recorded = record.steps
    for text in record.warnings:
        progress.warn(text)
    first = starting_step([of.step for of in recorded], places.complete(config.run_dir), request)
    chosen = consecutive(recorded, first, request.steps)
    if request.out.exists() and any(request.out.iterdir()):
        raise ConfigError(f"--out {request.out}: there is something in it already; give a new folder")
    checkpoint = checkpoints.of_step(config.run_dir, first) if first else None
    _introduce(config, checkpoint, chosen, request, progress)
    with progress.phase("loading the model"):
        trainer = build_trainer(config, checkpoint, demonstrations=demonstrations)
    return _Replay(config, trainer, request, progress).run(first, chosen)


def starting_step(recorded: Sequence[int], kept: Collection[int], request: Request) -> int:
    """Return the step to begin after, 0 for the initial model.

    Args:
        kept: Steps of the run's checkpoints.

    Raises:
        ConfigError: There is no such step.
    """
    if not recorded:
        raise ConfigError(f"{request.record}: it holds no step; was queue.record = true while the run trained?")
    fitting = sorted(step for step in {0, *kept} if step + 1 in recorded)
    asked = request.from_step
    if asked is None and fitting:
        return fitting[0]
    if asked is not None and asked in fitting:
        return asked
    there = ", ".join(str(step) for step in fitting) or "none"
    wanted = "no step" if asked is None else f"--from {asked}: not a step"
    raise ConfigError(
        f"{wanted} that a replay of {request.record} can begin after: it holds steps {recorded[0]} to {recorded[-1]}, "
        f"and begins after a checkpoint of the run, or after 0, its initial model; possible: {there}"
    )


def consecutive(recorded: Sequence[RecordedStep], first: int, most: int | None) -> list[RecordedStep]:
    """Return the steps after `first`, up to `most` of them or to one that is missing."""
    found: list[RecordedStep] = []
    for of in (of for of in recorded if of.step > first):
        if of.step != first + len(found) + 1 or len(found) == most:
            break
        found.append(of)
    return found


class _Replay:
    def __init__(self, config: RunConfig, trainer: Trainer, request: Request, progress: TerminalProgress) -> None:
        self._config = config
        self._trainer = trainer
        self._request = request
        self._progress = progress
        self._theirs = _figures_of(config.run_dir / METRICS)
        self._ranks = ranks_of(config)
        self._largest: dict[str, float] = {}
        self._compared = 0
        self._first_difference: int | None = None
        self._left_out: dict[str, str] = {}

    def run(self, first: int, steps: Sequence[RecordedStep]) -> Outcome:
        journal = Journal(self._request.out / METRICS, StepRecord, 0)
        made, tokens = 0, 0
        for recorded in steps:
            for lease, places_of in recorded.left_out.items():
                self._try(recorded, lease, places_of)
            if not recorded.trained:
                break  # the run ended here
            began, cpu = time.perf_counter(), time.process_time()
            batch = self._batch(recorded, recorded.trained)
            metrics = self._trainer.step(batch.rows, batch.rollouts)
            times = StepTimes(0.0, time.perf_counter() - began, time.process_time() - cpu, 0.0)
            tokens += batch.counts.tokens
            line = StepRecord(
                step=recorded.step,
                version=recorded.version,
                counts=batch.counts,
                metrics=metrics,
                times=times,
                num_tokens=tokens,
            )
            journal.append(line)
            self._compare(line)
            self._progress.show(line)
            made += 1
        outcome = self._outcome(first, made)
        (self._request.out / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(outcome)) + b"\n")
        self._conclude(outcome)
        return outcome

    def _batch(self, recorded: RecordedStep, groups: Sequence[RecordPosition]) -> Batch:
        _, branches, routed = self._trainer.batch_form
        draft = Draft(self._config, recorded.step, recorded.version - 1, "replay", branches, routed)
        try:
            dropped = draft.add(LeasedGroup(place.group(), place.head.arrival_version) for place in groups)
        except RecordError as error:
            raise ConfigError(str(error)) from error
        if dropped:
            ticket_id, reason = next(iter(dropped.items()))
            raise ConfigError(
                f"step {recorded.step}: {len(dropped)} groups that the run took would be dropped here, {ticket_id} for "
                f"{reason}: the settings are not the run's; give its own file, {self._config.run_file}"
            )
        return draft.finish()

    def _try(self, recorded: RecordedStep, lease: str, groups: Sequence[RecordPosition]) -> None:
        """Say whether a batch that the run left out fails here too. No weight is changed either way."""
        name = f"step {recorded.step}, batch {lease}"
        batch = self._batch(recorded, groups)
        try:
            with _without_a_change(self._trainer):
                self._trainer.step(batch.rows, batch.rollouts)
        except _NothingWrong:
            why = f"the run left it out ({groups[0].head.dropped}); here it could be trained"
        except (DivergedError, torch.OutOfMemoryError) as error:
            why = f"left out here as in the run ({groups[0].head.dropped}): {error}"
        self._trainer.discard()
        self._left_out[name] = why
        self._progress.warn(f"{name}: {why}")

    def _compare(self, line: StepRecord) -> None:
        theirs = self._theirs.get((line.step, line.version))
        if theirs is None:
            return
        self._compared += 1
        ours = msgspec.to_builtins(line.metrics)
        for name in COMPARED:
            one, other = ours[name], theirs[StepRecord.RENAMED.get(name, name)]
            if one == other:
                continue
            far = abs(one - other) if one is not None and other is not None else math.inf
            self._largest[name] = max(far, self._largest.get(name, 0.0))
            if self._first_difference is None:
                self._first_difference = line.step
                self._progress.warn(f"step {line.step}: {name} is {one}, and was {other} in the run")

    def _outcome(self, first: int, made: int) -> Outcome:
        return Outcome(
            record=str(self._request.record),
            from_step=first,
            steps=made,
            weights_sha256=digest(self._trainer),
            compared=self._compared,
            first_difference=self._first_difference,
            largest_difference=self._largest,
            left_out=self._left_out,
            ranks=self._ranks,
            device="cuda:0" if self._trainer.on_gpu else "cpu",
            threads=torch.get_num_threads(),
            torch=str(torch.__version__),
        )

    def _conclude(self, outcome: Outcome) -> None:
        if not outcome.compared:
            comparison = "the run's own metrics.jsonl has none of these steps to compare with"
        elif outcome.first_difference is None:
            comparison = f"every metric of {outcome.compared} steps is the run's own, to the bit"
        else:
            far = ", ".join(f"{name} {by:.3g}" for name, by in outcome.largest_difference.items())
            comparison = f"metrics differ from the run's own from step {outcome.first_difference} on, by at most: {far}"
            if outcome.ranks > 1:
                comparison += f"; of steps that {outcome.ranks} ranks made, differences of rounding are expected"
        self._progress.say(f"replayed {outcome.steps} steps; {comparison}")
        self._progress.say(f"weights sha256 {outcome.weights_sha256}; metrics in {self._request.out}", whole=True)


class _NothingWrong(Exception):
    """Raised in place of the optimiser step, when a batch that the run left out can be trained here."""


@contextmanager
def _without_a_change(trainer: Trainer) -> Iterator[None]:
    def stop() -> None:
        raise _NothingWrong

    end = trainer.before_change(stop)
    try:
        yield
    finally:
        end()


def digest(trainer: Trainer) -> str:
    """Return the SHA-256 over the names and bytes of all weights."""
    sums = hashlib.sha256()
    for name, weight in sorted(trainer.weights()):
        sums.update(name.encode())
        sums.update(weight.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def _introduce(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    chosen: Sequence[RecordedStep],
    request: Request,
    progress: TerminalProgress,
) -> None:
    where = config.model.path if checkpoint is None else checkpoint.path
    progress.say(f"replaying steps {chosen[0].step} to {chosen[-1].step} of {request.record}, from {where}")
    if (ranks := ranks_of(config)) > 1:
        progress.say(f"{ranks} ranks made the run's steps, and one makes them here: they agree but for rounding")
    made = made_with(config, chosen[0].step)
    if made and (different := [line for line in start.changed(config, made) if line.startswith(_THAT_COUNT)]):
        names = ", ".join(different)
        progress.warn(f"these settings differ from those with which the run made step {chosen[0].step}: {names}")


def made_with(config: RunConfig, step: int) -> CheckpointInfo | None:
    """Return the checkpoint whose settings made `step`: the first that holds it, or the one before; None without any.

    A resume between the two may have changed settings.
    """
    kept = sorted(places.complete(config.run_dir))
    nearest = next((each for each in kept if each >= step), kept[-1] if kept else None)
    return None if nearest is None else checkpoints.of_step(config.run_dir, nearest).info


def ranks_of(config: RunConfig) -> int:
    """Return how many ranks made the run's steps: as its file says, or as a launcher had it, which checkpoints
    know."""
    newest = checkpoints.latest(config.run_dir)
    known = newest.info.settings if newest is not None else None
    return max(config.learner.ranks, int((known or {}).get("learner.ranks", 1)))


def _figures_of(path: Path) -> Mapping[tuple[int, int], dict[str, Any]]:
    """Read the lines of the run's metrics by step and version."""
    if not path.exists():
        return {}
    lines = (msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.endswith(b"}"))
    return {(line["step"], line["version"]): line for line in lines}
