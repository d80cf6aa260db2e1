"""Keeps and shows a run: its journals, its curve, its trackers and the learner's part of the terminal."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence

from slipstream.learner.report import sampler_checks, summary
from slipstream.learner.report.journal import Journal, newest_step
from slipstream.learner.report.progress import TerminalProgress
from slipstream.learner.report.records import EvaluationRecord, PublicationRecord, StepRecord, beside, published
from slipstream.learner.report.rollouts import RolloutLog
from slipstream.learner.report.summary import Curve, sparkline
from slipstream.learner.report.tracking import CLOSE_S, Tracking
from slipstream.protocol import checkpoints, history
from slipstream.protocol.config import RunConfig
from slipstream.protocol.messages import RunPosition
from slipstream.protocol.rollouts import FILE_NAME as ROLLOUTS
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Status
from slipstream.weight_sync.fleet.publications import PublishRecord

# Characters of the reward curve on the terminal.
MAX_SPARKLINE = 60


class Reports:
    """Writes and shows the reports of one session. Lines of steps after `step`, where the session begins, are
    forgotten."""

    def __init__(self, config: RunConfig, step: int, progress: TerminalProgress) -> None:
        self._config = config
        self._progress = progress
        path = config.run_dir / "metrics.jsonl"
        self._tracking = Tracking(config, step, newest_step(path), progress.warn)
        self._steps = Journal(path, StepRecord, step, progress.warn)
        self._publications = Journal(config.run_dir / "publications.jsonl", PublicationRecord, step, progress.warn)
        self._rollouts = RolloutLog(config.run_dir / ROLLOUTS, step, warn=progress.warn)
        self._curve = Curve(config.run_dir / "reward.png")
        self._newest: PublishRecord | None = None
        self._publications_seen = 0
        # Each warns once in a session.
        self._checks = [sampler_checks.no_experts_warning]
        if not config.rollout.accept_sampler_mismatch:
            self._checks.append(sampler_checks.sampler_kl_warning)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens of all groups that arrived, up to the newest step."""
        return self._steps.records[-1].num_tokens if self._steps.records else 0

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [record.counts.reward_mean for record in self._steps.records]

    def step(self, record: StepRecord, samples: Sequence[RolloutView]) -> None:
        """Write a step that the queue has acknowledged, and some of its rollouts, into the journals."""
        self._steps.append(record)
        samples = samples[: self._config.learner.sample_rollouts]
        self._rollouts.append(samples)
        self._tracking.step(record.step, record.flat(), samples)

    def show(self, record: StepRecord, samples: Sequence[RolloutView], evaluations: Sequence[EvaluationRecord]) -> None:
        """Show the same step on the terminal and on the curve."""
        self._progress.show(record)
        for check in list(self._checks):
            if (text := check(record.metrics)) is not None:
                self._progress.warn(text)
                self._checks.remove(check)
        every = self._config.learner.show_rollout_every
        if samples and every and record.step % every == 0:
            self._progress.show_rollout(samples[0])
        self._curve.grow(self._steps.records, evaluations)

    def publications(self, ended: Sequence[PublishRecord], position: RunPosition) -> None:
        """Write the publications that have ended since the last call.

        Args:
            ended: Those of the session, in the order in which they ended.
        """
        offset = position.version - position.step
        for publication in ended[self._publications_seen :]:
            self._publications.append(PublicationRecord(publication.version - offset, publication))
            self._newest = publication
        self._publications_seen = len(ended)

    def weight_sync(self) -> dict[str, float]:
        """Return metrics of the newest publication for a step's line, each once; empty where none is new."""
        newest, self._newest = self._newest, None
        return published(newest) if newest is not None else {}

    def late(self, evaluations: Sequence[Mapping[str, float]]) -> None:
        """Add metrics of evaluations that ended after the last step to the last step's line."""
        if evaluations:
            self._steps.amend(lambda line: beside(line, evaluations))
        for metrics in evaluations:
            self._tracking.evaluation(metrics)

    def summarise(self, status: Status, evaluations: Sequence[EvaluationRecord]) -> None:
        """Write the whole run's metrics and its curve, when it has made its last step."""
        records = self._steps.records
        found = summary.summarise(records, self._publications.records, status, evaluations, time.time())
        summary.write(self._config.run_dir, found)
        self._curve.finish(records, evaluations)

    def conclude(self, status: Status) -> None:
        """Print the last lines of the terminal: what was trained, what was lost, and whether nothing was learnt.

        Of a run that made no step, as an evaluation by itself, there is nothing to say.
        """
        if not self._steps.records:
            return
        width = self._progress.console.width - len("reward  0.000 to 0.000")
        self._progress.say(f"reward {sparkline(self.rewards, min(MAX_SPARKLINE, width))}")
        self._progress.say(f"reward {history.ends_of(self.rewards)}")
        lost = sorted(status.drops.items(), key=lambda drop: -drop[1])
        self._progress.say(f"groups: {status.ledger.trained} trained{''.join(f', {n} {why}' for why, n in lost)}")
        run_dir = self._config.run_dir
        if kept := checkpoints.complete(run_dir):
            self._progress.say(
                f"model: {kept[max(kept)] / checkpoints.MODEL} (loads in transformers and vLLM)", whole=True
            )
        self._progress.say(f"report: slipstream report {shlex.quote(str(run_dir))}", whole=True)
        if (text := summary.nothing_learnt(self._steps.records, status.diagnosis)) is not None:
            self._progress.warn(text)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let each tracker send its waiting jobs, for at most `timeout_s` seconds."""
        if self._tracking.names:
            with self._progress.phase(f"sending the last metrics to {', '.join(self._tracking.names)}"):
                self._tracking.close(timeout_s)
