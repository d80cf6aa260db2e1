"""Ends a run whose policy an update has destroyed (`learner.on_collapse`). The rule is that of `protocol.collapse`, by
which the queue's diagnosis names it too."""

from __future__ import annotations

from collections import deque

from slipstream.learner import start
from slipstream.learner.checkpoints import checkpoint as checkpoints
from slipstream.learner.ranks.stopping import LearnerFailed
from slipstream.learner.report.records import StepRecord
from slipstream.protocol import checkpoints as places
from slipstream.protocol.collapse import LOWER, WINDOW_STEPS, Collapse, Row, find_collapse
from slipstream.protocol.config import RunConfig


class PolicyDestroyed(LearnerFailed):
    """An update destroyed the policy, and more steps would only train what is left of it."""


class CollapseWatch:
    """Looks at the steps of one session."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._rows: deque[Row] = deque(maxlen=WINDOW_STEPS)

    def step(self, record: StepRecord) -> None:
        """Judge a step that the queue has acknowledged, before its version is published or kept.

        Raises:
            PolicyDestroyed: With `learner.on_collapse = "stop"`. Checkpoints from after the update are moved aside, so
                that a resume takes the last good one.
        """
        if self._config.learner.on_collapse == "warn":
            return
        self._rows.append(record.flat())
        if (found := find_collapse([*self._rows])) is not None:
            raise PolicyDestroyed(
                f"step {record.step}: {found.describe(self._config.learner.learning_rate)}. {self._way_back(found)} "
                f'(learner.on_collapse = "warn" goes on instead)'
            )

    def _way_back(self, found: Collapse) -> str:
        run_dir = self._config.run_dir
        checkpoints.set_aside(run_dir, found.good_step)
        kept = places.complete(run_dir)
        begin = f"Go on from step {max(kept)}" if kept else "There is no checkpoint from before it: begin again"
        rate = self._config.learner.learning_rate / LOWER
        return f"{begin} with: {start.resume_command()} --learner.learning_rate {rate:g}"
