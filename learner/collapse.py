"""Ends a run whose policy an update has destroyed (`learner.on_collapse`). The rule is that of `protocol.collapse`, by
which the queue's diagnosis names it too."""

from __future__ import annotations

from collections import deque

from slipstream.learner import start
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.learner.report.records import StepRecord
from slipstream.protocol import checkpoints as places
from slipstream.protocol.collapse import CAUSE, WINDOW_STEPS, Row, find_collapse
from slipstream.protocol.config import RunConfig
from slipstream.protocol.config.learning_rates import lower_rate
from slipstream.protocol.status import Status


class PolicyDestroyed(LearnerFailed):
    """An update destroyed the policy, and more steps would only train what is left of it.

    Args:
        step: The step whose update did it.
        found: How that is seen, with the remedy.
    """

    def __init__(self, step: int, found: str) -> None:
        super().__init__(found)
        self.step = step


class CollapseWatch:
    """Looks at the steps of one session."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._rows: deque[Row] = deque(maxlen=WINDOW_STEPS)

    def step(self, record: StepRecord) -> None:
        """Judge a step that the queue has acknowledged, before its version is published or kept.

        Raises:
            PolicyDestroyed: With `learner.on_collapse = "stop"`.
        """
        if self._config.learner.on_collapse == "warn":
            return
        self._rows.append(record.flat())
        if (found := find_collapse([*self._rows])) is not None:
            text = found.describe(self._config.learner.learning_rate, lower_rate(self._config))
            raise PolicyDestroyed(found.step, f"step {record.step}: {text}")

    def waiting(self, status: Status) -> PolicyDestroyed | None:
        """Judge the wait for the next step by the queue's status: a destroyed policy that samples for itself, at a
        staleness of 0, may never yield a group that is worth a step. Returns the error that ends the wait, if one
        should."""
        if not self._rows or self._rows[-1]["step"] != status.step:
            return None
        named = (cause.text for cause in status.diagnosis if cause.about == CAUSE)
        return next((PolicyDestroyed(status.step, text) for text in named), None)

    def set_aside(self, error: PolicyDestroyed) -> PolicyDestroyed:
        """Move checkpoints from after the update aside, so that a resume takes the last good one. Returns the error
        with the way back."""
        run_dir = self._config.run_dir
        checkpoints.set_aside(run_dir, max(0, error.step - 1))
        kept = places.complete(run_dir)
        begin = f"Continue from step {max(kept)}" if kept else "There is no checkpoint from before it: begin again"
        resume = start.resume_command(lower_rate(self._config))
        return PolicyDestroyed(
            error.step,
            f'{error}. {begin} with: {resume} (learner.on_collapse = "warn" continues instead)',
        )
