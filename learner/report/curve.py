"""The reward curve: `reward.png`, which grows with the run, and the same curve as one line of text."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from learner.report.evaluations import EvaluationRecord
from learner.report.records import StepRecord

BARS = "▁▂▃▄▅▆▇█"
SMOOTHED_OVER = 10
DRAW_EVERY_S = 30.0

logger = logging.getLogger(__name__)


class Curve:
    """Keeps `path` up to date beside the training, drawn at most once in `DRAW_EVERY_S`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "curve")
        self._drawing: Future[None] | None = None
        self._drawn_at = clock()

    def grow(self, records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord] = ()) -> None:
        """Draw in the background, if that is due and the drawing before has ended."""
        if self._clock() - self._drawn_at < DRAW_EVERY_S or (self._drawing and not self._drawing.done()):
            return
        self._drawn_at = self._clock()
        self._draw(records, evaluations)

    def finish(self, records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord] = ()) -> None:
        """Draw the whole curve, and wait for it."""
        self._draw(records, evaluations).result()
        self._thread.shutdown()

    def _draw(self, records: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> Future[None]:
        steps, rewards = [of.step for of in records], [of.tally.reward_mean for of in records]
        evaluated = sorted((of.step, of.evaluation.reward) for of in evaluations if of.evaluation.reward is not None)
        self._drawing = self._thread.submit(self._try_to_draw, steps, rewards, evaluated)
        return self._drawing

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
    """Write the picture; who looks meanwhile sees the one before. `evaluated`: steps with the reward of their
    evaluation, ascending."""
    from matplotlib.figure import Figure  # here alone, so that nothing else needs it
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
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
    figure.savefig(aside, dpi=150, format="png")
    os.replace(aside, path)


def smoothed(values: Sequence[float]) -> list[float]:
    """At each step, the mean of it and of up to nine before."""
    return [float(np.mean(values[max(0, i + 1 - SMOOTHED_OVER) : i + 1])) for i in range(len(values))]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """`values` as bars between their least and greatest; neighbours are averaged to fit `width`."""
    if not values:
        return ""
    columns = [float(part.mean()) for part in np.array_split(np.array(values), min(width, len(values)))]
    low, high = min(columns), max(columns)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in columns)
