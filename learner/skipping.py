"""Leaves out batches that cannot be trained, counts and names them, until there are too many in a row.

A batch that is left out changes nothing: no weight, nor the optimiser, nor its schedule; no version is made. The queue
drops its groups, so that no step meets them again.

Where several ranks share a step and the memory of one does not hold its part, the others wait for it in the middle of
the step. That ends the run, but the batch is left out before, so that the resume does not meet it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.learner.feed.feeder import Feeder
from slipstream.learner.feed.step_draft import Batch
from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.learner.report.journal import Journal, Record
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.training.base import DivergedError, RanksOutOfMemory, StepMetrics, Trainer
from slipstream.protocol import reasons

FILE_NAME = "left_out.jsonl"
GO_ON = "Continue from the last checkpoint, which is intact, with --resume"
# Tickets of a batch that are named on the terminal.
_NAMED = 4


class OutOfMemory(LearnerFailed):
    """The device's memory does not hold what a step needs."""


@dataclass(frozen=True)
class LeftOut(Record):
    """A batch that the learner's `version` could not train at `step`.

    Attributes:
        groups: Its tickets, which begin with the index of their row.
    """

    version: int
    reason: str
    why: str
    groups: list[str]


class Attempts:
    """Tries the steps of one session.

    Args:
        most: Batches in a row that may be left out; one more ends the run.
        report: Called with the text for each.
    """

    def __init__(
        self,
        trainer: Trainer,
        most: int,
        run_dir: Path,
        step: int,
        progress: TerminalProgress,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._trainer = trainer
        self._most = most
        self._path, self._from_step = run_dir / FILE_NAME, step
        self._progress = progress
        self._report = report
        self._journal = Journal(self._path, LeftOut, step) if self._path.exists() else None
        self._in_a_row = 0
        self._changing = False
        trainer.before_change(self._on_change)

    def step(self, batch: Batch, feeder: Feeder) -> StepMetrics | None:
        """Train on a batch; returns None where it was left out. Raises `DivergedError`, `OutOfMemory`."""
        self._changing = False
        ranks_stuck = False
        try:
            metrics = self._trainer.step(batch.rows, batch.rollouts)
        except DivergedError as error:
            failure: LearnerFailed = error
            reason = reasons.STEP_NOT_FINITE
        except torch.OutOfMemoryError as error:
            failure, reason = _out_of_memory(str(error), batch), reasons.OUT_OF_MEMORY
            ranks_stuck = isinstance(error, RanksOutOfMemory)
        else:
            self._in_a_row = 0
            return metrics
        # Not inside the except clauses: here the tensors that the exception's frames held are free.
        self._trainer.discard()
        if self._changing:
            raise type(failure)(f"{failure}. It came while weights were changing, so they must not be used. {GO_ON}")
        if self._in_a_row >= self._most:
            many = (
                f"{self._in_a_row + 1} batches in a row cannot be trained, and learner.skip_bad_batches = {self._most}"
            )
            raise type(failure)(f"step {batch.step}: {f'{many}; ' if self._most else ''}{failure}. {GO_ON}")
        self._in_a_row += 1
        self._tell(batch, LeftOut(batch.step, batch.version, reason, str(failure), batch.ticket_ids))
        feeder.leave_out(batch, reason)
        if ranks_stuck:
            raise type(failure)(
                f"step {batch.step}: {failure}. The batch is left out; the run ends all the same, since ranks cannot "
                f"continue from the middle of a step. {GO_ON}"
            )
        return None

    def _on_change(self) -> None:
        self._changing = True

    def _tell(self, batch: Batch, left_out: LeftOut) -> None:
        if self._journal is None:
            self._journal = Journal(self._path, LeftOut, self._from_step)
        self._journal.append(left_out)
        named = ", ".join(left_out.groups[:_NAMED])
        more = f" and {len(left_out.groups) - _NAMED} more" if len(left_out.groups) > _NAMED else ""
        text = (
            f"step {batch.step}: a batch is left out ({left_out.reason}), {self._in_a_row} in a row of the "
            f"learner.skip_bad_batches = {self._most} that may be: groups {named}{more}, see {self._path.name}: "
            f"{left_out.why}"
        )
        self._progress.warn(text)
        self._report(text)


def _out_of_memory(error: str, batch: Batch) -> OutOfMemory:
    largest = max(row.tokens for row in batch.rows)
    first = error.strip().partition("\n")[0]
    return OutOfMemory(
        f"the device's memory does not hold the step, whose largest row has {largest} tokens ({first}): lower "
        f"learner.token_budget, or set learner.gradient_checkpointing = true"
    )
