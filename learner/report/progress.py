"""Writes the terminal: one live line that fits its width, and above it the lines that stay.

The live line says what the learner waits for, or shows the newest step. Without a terminal both are printed now and
then. If the log is another file than the terminal, every step and every line that stays go there too.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from slipstream.learner.report import rollouts
from slipstream.learner.report.records import StepRecord
from slipstream.learner.report.rollouts import printable
from slipstream.learner.report.sampler_checks import suspicious
from slipstream.protocol import log_lines
from slipstream.protocol.messages import ServerState
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Evaluation, Status

# Seconds between printed lines of a wait: three heartbeats of a worker.
SILENT_AFTER_S = 30.0

# Workers or servers that are named one by one.
_MAX_NAMED = 4

# Waits that the line leaves out, because it shows the learner's, the servers' and the workers' in another way.
SHOWN_ELSEWHERE = ("learner", "learner (next batch)", "the queue")

PRINT_EVERY_STEPS = 10

PRINT_EVERY_S = 30.0

# A shorter wait is not worth a line.
SAY_WAIT_AFTER_S = 2.0

# Steps from which the time left is estimated.
ESTIMATE_OVER = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Phase:
    what: str
    since: float


class TerminalProgress:
    """The learner's part of the terminal, a context manager. Its methods may be called from any thread.

    Args:
        clock: Seconds, monotonic.
        log: Whether lines go to the log too; by default if it is not the same file.
        show_sampler_kl: Whether every step shows it; otherwise only steps where it is suspicious.
    """

    def __init__(
        self,
        total_steps: int,
        groups_per_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        log: bool | None = None,
        show_sampler_kl: bool = False,
    ) -> None:
        self.console = console or Console()
        self.status: Status | None = None
        self._total_steps = total_steps
        self._groups_per_step = groups_per_step
        self._clock = clock
        self._log = log_lines.is_apart() if log is None else log
        self._show_sampler_kl = show_sampler_kl
        self._phase: _Phase | None = None
        self._newest: StepRecord | None = None
        self._evaluation: Evaluation | None = None
        self._step_s: deque[float] = deque(maxlen=ESTIMATE_OVER)
        self._printed_at = -float("inf")
        self._gone = False
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._line, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            with suppress(OSError, SystemExit):
                self._live.stop()

    def say(self, text: str, whole: bool = False) -> None:
        """Print a line that stays. With `whole` it holds a command to copy, and is not broken at words."""
        self._print(Text(printable(text)), whole)
        self._to_log(logging.INFO, text)

    def warn(self, text: str) -> None:
        """Print a line that a person should act on."""
        self._print(Text(f"! {printable(text)}", style="bold yellow"))
        self._to_log(logging.WARNING, text)

    def show_evaluation(self, evaluation: Evaluation, text: str) -> None:
        """Print an evaluation that has ended; from here on the newest is named next to the steps."""
        if self._evaluation is None or evaluation.step >= self._evaluation.step:
            self._evaluation = evaluation
        self.say(text)

    def show_rollout(self, view: RolloutView) -> None:
        """Print a rollout."""
        self._print(rollouts.render_rollout(view))

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Show `what` as the thing that the learner waits for or loads, inside the `with`."""
        self._phase = _Phase(what, self._clock())
        try:
            yield
        finally:
            self._phase = None

    def tick(self) -> None:
        """Draw the live line again; without a terminal, print what is waited for if that is due. To be called each
        second."""
        phase, now = self._phase, self._clock()
        if self._live is not None:
            self._draw(lambda: None)
            return
        if phase is None:
            return
        waited = now - phase.since >= (SAY_WAIT_AFTER_S if self._newest is None else PRINT_EVERY_S)
        printed = self._printed_at >= phase.since and now - self._printed_at < PRINT_EVERY_S
        if waited and not printed:
            self._printed_at = now
            self.say(self._waiting(phase))

    def show(self, record: StepRecord) -> None:
        """Show a step that is done."""
        first, self._newest = self._newest is None, record
        self._step_s.append(record.times.step_s)
        now = self._clock()
        text = self._step_line(record)
        self._to_log(logging.INFO, text)
        if self._live is not None:
            self._draw(lambda: None)
            return
        due = record.step % PRINT_EVERY_STEPS == 0 or now - self._printed_at >= PRINT_EVERY_S
        if first or due or record.step == self._total_steps:
            self._printed_at = now
            self._print(Text(text))

    def _line(self) -> RenderableType:
        phase, newest = self._phase, self._newest
        if phase is not None and (newest is None or self._clock() - phase.since >= SAY_WAIT_AFTER_S):
            text = self._waiting(phase)
        else:
            text = "" if newest is None else self._step_line(newest, self.console.width)
        return Text(text, no_wrap=True, overflow="ellipsis")

    def _waiting(self, phase: _Phase) -> str:
        others = waits_of(self.status, self._groups_per_step) if self.status is not None else ""
        return f"{_duration(self._clock() - phase.since)} {phase.what}{f': {others}' if others else ''}"

    def _step_line(self, record: StepRecord, width: int | None = None) -> str:
        left_s = (self._total_steps - record.step) * fmean(self._step_s)
        depth = self.status.depth if self.status is not None else None
        return line(record, self._total_steps, left_s, depth, width, self._show_sampler_kl, self._evaluation)

    def _print(self, what: RenderableType, whole: bool = False) -> None:
        # A file gets one line; a terminal breaks lines at words.
        self._draw(lambda: self.console.print(what, highlight=False, soft_wrap=whole or self._live is None))

    def _draw(self, draw: Callable[[], None]) -> None:
        """Draw on the terminal. A terminal or a pipe that is gone must not end the learner: the log remains."""
        try:
            if self._live is not None:
                self._live.refresh()  # or it would be drawn again below without its newest content
            draw()
        except (OSError, SystemExit) as error:  # rich makes the latter of a broken pipe
            if not self._gone:
                self._gone = True
                logger.warning("nothing more can be shown: %s", error.__cause__ or error.__context__ or error)

    def _to_log(self, level: int, text: str) -> None:
        if self._log:
            logger.log(level, "%s", text)


def line(
    record: StepRecord,
    total_steps: int,
    left_s: float,
    depth: float | None = None,
    width: int | None = None,
    show_sampler_kl: bool = False,
    evaluation: Evaluation | None = None,
) -> str:
    """Format a step in as many of its metrics as `width` characters hold, the most important first.

    Args:
        left_s: Seconds until the last step.
        depth: Groups outstanding at the queue, in optimiser steps.
        width: Characters; None for all metrics.
        show_sampler_kl: Whether to show it even where it is not suspicious.
        evaluation: The newest that has ended.
    """
    counts, times, kl = record.counts, record.times, record.metrics.sampler_kl_staleness_0
    shows_kl = kl is not None and (show_sampler_kl or suspicious(record.metrics))
    parts = [
        f"step {record.step:>{len(str(total_steps))}}/{total_steps}",
        f"reward {counts.reward_mean:.3f}",
        *_evaluated(evaluation),
        *([] if (teacher := record.metrics.objective.get("teacher/kl")) is None else [f"teacher KL {teacher:.3f}"]),
        f"{_duration(left_s)} left",
        *([f"sampler KL {kl:.2g}"] if shows_kl else []),
        f"{times.step_s:.2f} s, {times.wait_s / times.step_s:.0%} waiting",
        f"staleness {counts.staleness_mean:.2f} (max {counts.staleness_max})",
        f"{counts.tokens_sampled / times.step_s:,.0f} tokens/s",
        *([] if depth is None else [f"depth {depth:.1f}"]),
    ]
    while width is not None and len(parts) > 1 and len(" | ".join(parts)) > width:
        parts.pop()
    return " | ".join(parts)


def waits_of(status: Status, groups_per_step: int) -> str:
    """Describe a wait for groups from the queue's status: servers that do not serve, groups that are ready or in work,
    and waits of workers. Empty if all is well."""
    absent = [server for server in status.servers if server.state is not ServerState.SERVING]
    if len(absent) > _MAX_NAMED:
        counts = Counter(server.state for server in absent)
        waits = [f"{count:,} servers are {state}" for state, count in counts.items()]
    else:
        waits = [f"{server.name} is {server.state}" for server in absent]
    if not status.servers:
        waits.append("no server has registered")
    elif len(absent) < len(status.servers):
        groups = status.groups
        waits.append(f"{groups.ready + groups.leased} of {groups_per_step} groups, {groups.tickets} in work")
    if not status.workers:
        waits.append("no worker is connected")
    refused = [worker.worker_id for worker in status.workers if worker.does == "refused"]
    if refused:
        waits.append(f"{refused[0]} is refused" if len(refused) == 1 else f"{len(refused):,} workers are refused")
    silent = {
        worker.worker_id: worker.seen_s_ago
        for worker in status.workers
        if worker.seen_s_ago > SILENT_AFTER_S and worker.does not in ("refused", "left")
    }
    if len(silent) > _MAX_NAMED:
        silent = {f"{len(silent):,} workers": max(silent.values())}
    waits += [f"{who} silent for {seconds:.0f} s" for who, seconds in silent.items()]
    named = {*SHOWN_ELSEWHERE, *(f"server {server.name}" for server in status.servers)}
    waits += [
        f"{wait.who} {wait.verb} for {wait.what}, {wait.since_s:.0f} s"
        for wait in status.waits
        if wait.who not in named and not wait.who.endswith(" servers")
    ]
    return "; ".join(waits)


def _evaluated(evaluation: Evaluation | None) -> list[str]:
    if evaluation is None or evaluation.reward is None:
        return []
    return [f"eval {evaluation.reward:.3f} at step {evaluation.step}"]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
