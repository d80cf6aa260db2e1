"""Writes the result of a run: `summary.json`, and the reward curve, as `reward.png` that grows with the run and as a
line of text.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from slipstream.learner.feed.rollout_metrics import ratio
from slipstream.learner.report.records import EvaluationRecord, PublicationRecord, StepRecord
from slipstream.protocol.history import ends_of
from slipstream.protocol.messages import EQUAL_WITHIN, are_equal
from slipstream.protocol.status import Cause, Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Metrics of a step that are standard deviations of rewards, in all or of one function.
_SPREAD = re.compile("reward_std|rewards/.+/std")


class Summary(msgspec.Struct):
    """The metrics of a run, over the steps that no resume gave up.

    Shares are from 0 to 1; `_ms` are milliseconds, percentiles over publications. None where nothing was measured.

    Attributes:
        wall_s: Seconds of the steps, without the start; rates are per second of it.
        reward_first10: Mean over the first `reward_over` steps; `reward_last10` over the last. They have no step in
            common, unless there is only one.
        reward_over: At most 10, and at most half of the steps.
        eval_reward_first: Of the evaluations that have a reward, by step; `_last` and `_best` likewise.
        sync_skipped: Versions that a newer one overtook before a server had taken them.
        sync_sent_bytes: To all servers.
        sync_whole_bytes: Bytes of all publications without deltas.
        sync_share_changed_mean: Over the publications with deltas.
        run: The run's name.
        ended_at: Seconds since 1970.
        nothing_learnt: Why the policy is what it was, or no better for its rewards; None if there is no reason to say
            so.
        diagnosis: What kept the run from learning when it ended.
    """

    steps: int
    wall_s: float
    step_s_mean: float | None
    reward_first10: float | None
    reward_last10: float | None
    reward_over: int
    evaluations: int
    eval_reward_first: float | None
    eval_reward_last: float | None
    eval_reward_best: float | None
    rollouts: int
    rollouts_two_versions: int
    groups_trained: int
    groups_dropped: dict[str, int]
    tokens_sampled: int
    tokens_trained: int
    gen_tokens_per_s: float | None
    train_tokens_per_s: float | None
    staleness_mean: float | None
    staleness_max: int
    learner_wait_share: float | None
    worker_wait_share: float | None
    worker_cpu_ms_per_episode: float | None
    learner_cpu_us_per_trained_token: float | None
    sync_count: int
    sync_skipped: int
    sync_pause_ms_p50: float | None
    sync_pause_ms_p95: float | None
    sync_transfer_ms_p50: float | None
    sync_learner_blocked_ms_p50: float | None
    sync_sent_bytes: int
    sync_whole_bytes: int
    sync_share_changed_mean: float | None
    probe_max_abs_diff: float | None
    run: str = ""
    ended_at: float | None = None
    nothing_learnt: str | None = None
    diagnosis: list[Cause] = []


def summarise(
    steps: Sequence[StepRecord],
    publications: Sequence[PublicationRecord],
    status: Status,
    evaluations: Sequence[EvaluationRecord] = (),
    ended_at: float | None = None,
) -> Summary:
    """Summarise a run.

    Args:
        status: The queue's status, for drops of every cause, sampled tokens, the workers' metrics and the diagnosis.
        ended_at: Seconds since 1970.
    """
    counts, times = [step.counts for step in steps], [step.times for step in steps]
    rewards = [of.reward_mean for of in counts]
    in_order = sorted(evaluations, key=lambda record: record.step)
    evaluated = [reward for record in in_order if (reward := record.evaluation.reward) is not None]
    published = [record.publication for record in publications]
    pauses_ms = [publication.pause_s * 1e3 for publication in published]
    wall_s = sum(of.step_s for of in times)
    trained = sum(of.tokens_trained for of in counts)
    ends = ends_of(rewards)
    return Summary(
        steps=len(steps),
        wall_s=wall_s,
        step_s_mean=ratio(wall_s, len(steps)),
        reward_first10=ends.first if ends else None,
        reward_last10=ends.last if ends else None,
        reward_over=ends.over if ends else 0,
        evaluations=len(evaluations),
        eval_reward_first=evaluated[0] if evaluated else None,
        eval_reward_last=evaluated[-1] if evaluated else None,
        eval_reward_best=max(evaluated, default=None),
        rollouts=sum(of.rollouts for of in counts),
        rollouts_two_versions=sum(of.two_span_rollouts for of in counts),
        groups_trained=sum(of.groups_trained for of in counts),
        groups_dropped=dict(status.drops),
        tokens_sampled=status.tokens_sampled,
        tokens_trained=trained,
        gen_tokens_per_s=ratio(status.tokens_sampled, wall_s),
        train_tokens_per_s=ratio(trained, wall_s),
        staleness_mean=ratio(sum(of.staleness_mean * of.tokens_trained for of in counts), trained),
        staleness_max=max((of.staleness_max for of in counts), default=0),
        learner_wait_share=ratio(sum(of.wait_s for of in times), wall_s),
        worker_wait_share=status.worker_wait_share,
        worker_cpu_ms_per_episode=status.worker_cpu_ms_per_episode,
        learner_cpu_us_per_trained_token=ratio(1e6 * sum(of.cpu_s for of in times), trained),
        sync_count=len(published),
        sync_skipped=sum(publication.skipped for publication in published),
        sync_pause_ms_p50=_percentile(pauses_ms, 50),
        sync_pause_ms_p95=_percentile(pauses_ms, 95),
        sync_transfer_ms_p50=_percentile([publication.transfer_s * 1e3 for publication in published], 50),
        sync_learner_blocked_ms_p50=_percentile([publication.blocked_s * 1e3 for publication in published], 50),
        sync_sent_bytes=sum(publication.sent_bytes for publication in published),
        sync_whole_bytes=sum(publication.whole_bytes for publication in published),
        sync_share_changed_mean=_mean(
            [publication.share_changed for publication in published if publication.share_changed is not None]
        ),
        probe_max_abs_diff=max((publication.probe_max_abs_diff for publication in published), default=None),
        run=status.run,
        ended_at=ended_at,
        nothing_learnt=nothing_learnt(steps, status.diagnosis),
        diagnosis=status.diagnosis,
    )


def nothing_learnt(steps: Sequence[StepRecord], diagnosis: Sequence[Cause]) -> str | None:
    """Say why a run has taught its policy nothing: every gradient was 0, or all rewards were equal all along.

    Args:
        diagnosis: What kept it from learning, the likeliest first.

    Returns:
        None if it may have learnt something, or made no step.
    """
    if not steps:
        return None
    rewards = {step.counts.reward_mean for step in steps}
    if all(step.metrics.grad_norm == 0 for step in steps):
        found = f"the gradient was 0 in all of its {len(steps)} steps, so no step changed what the policy says"
    elif are_equal(list(rewards)) and not any(map(_rewards_differ, steps)):
        found = f"all rewards were {rewards.pop():g} in all of its {len(steps)} steps"
    else:
        return None
    why = diagnosis[0].text if diagnosis else "read what it said with `slipstream rollouts`, and look at its rewards"
    return f"nothing was learnt: {found}. {why[0].upper()}{why[1:]}"


def _rewards_differ(step: StepRecord) -> bool:
    """Tell whether rewards differ, in all or by one function: `gdpo` learns from functions whose sums are equal."""
    return any(value and value > EQUAL_WITHIN for name, value in step.flat().items() if _SPREAD.fullmatch(name))


def write(run_dir: Path, summary: Summary) -> None:
    """Write `summary.json`."""
    (run_dir / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


BARS = "▁▂▃▄▅▆▇█"

SMOOTHED_OVER = 10

DRAW_EVERY_S = 30.0

logger = logging.getLogger(__name__)


class Curve:
    """Keeps the picture at `path` up to date during the training, drawn at most once in `DRAW_EVERY_S` seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "curve")
        self.drawing: Future[None] | None = None
        self._drawn_at = clock()

    def grow(self, records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord] = ()) -> None:
        """Draw in the background, if that is due and the last drawing has ended."""
        if self._clock() - self._drawn_at < DRAW_EVERY_S or (self.drawing and not self.drawing.done()):
            return
        self._drawn_at = self._clock()
        self._draw(records, evaluations)

    def finish(self, records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord] = ()) -> None:
        """Draw the whole curve, and waits for it."""
        self._draw(records, evaluations).result()
        self._thread.shutdown()

    def _draw(self, records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Future[None]:
        steps, rewards = [of.step for of in records], [of.counts.reward_mean for of in records]
        evaluated = sorted((of.step, of.evaluation.reward) for of in evaluations if of.evaluation.reward is not None)
        self.drawing = self._thread.submit(self._try_to_draw, steps, rewards, evaluated)
        return self.drawing

    def _try_to_draw(
        self, steps: Sequence[int], rewards: Sequence[float], evaluated: Sequence[tuple[int, float]]
    ) -> None:
        try:
            draw_rewards(self._path, steps, rewards, evaluated)
        except Exception:  # a picture must not end a run
            logger.exception("%s could not be drawn", self._path)


def draw_rewards(
    path: Path, steps: Sequence[int], rewards: Sequence[float], evaluated: Sequence[tuple[int, float]] = ()
) -> None:
    """Write the picture in one rename.

    Args:
        evaluated: Steps with the reward of their evaluation, ascending.
    """
    from matplotlib.ticker import MaxNLocator  # slow to import, and needed here only

    figure = _figure()
    figure.clear()
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#9db7d5", linewidth=1, label="groups that arrived for the step")
    axes.plot(steps, smoothed(rewards), color="#1f4e8c", linewidth=2, label=f"mean of the last {SMOOTHED_OVER}")
    if evaluated:
        at, reward = zip(*evaluated, strict=True)
        axes.plot(at, reward, color="#c2571a", marker="o", markersize=5, linewidth=1, linestyle=":", label="evaluation")
    axes.set(xlabel="optimiser step", ylabel="mean reward", title="Reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    aside = path.with_name(f".unfinished-{path.name}")
    figure.savefig(aside, format="png")
    os.replace(aside, path)


@cache
def _figure() -> Figure:
    """Return the one figure of this process.

    A new one for each drawing would keep 4 MB of pixels until Python collects everything, since its parts refer to each
    other: some hundred MB in an hour.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def smoothed(values: Sequence[float]) -> list[float]:
    """Return for each step the mean of its value and of up to nine before it."""
    return [float(np.mean(values[max(0, i + 1 - SMOOTHED_OVER) : i + 1])) for i in range(len(values))]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draw `values` as bars between their least and greatest, and name these two; neighbours are averaged to fit
    `width`."""
    if not values:
        return ""
    columns = [float(part.mean()) for part in np.array_split(np.array(values), min(max(1, width), len(values)))]
    low, high = min(columns), max(columns)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(BARS[round((value - low) * scale)] for value in columns)
    return f"{bars} {low:.3f} to {high:.3f}"
