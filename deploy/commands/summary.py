"""`slipstream summary`: what happened in a run, what it cost, and what is not as it should be, in about ten lines."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from slipstream.deploy.commands.arguments import AsJson, print_json
from slipstream.deploy.commands.report import read_run, run_dir_of
from slipstream.learner.report.rollouts import printable
from slipstream.protocol import history, reasons
from slipstream.protocol.collapse import CAUSE, REMEDY
from slipstream.protocol.config import ConfigError
from slipstream.protocol.history import Entry, PageData, ends_of
from slipstream.protocol.messages import ServerState
from slipstream.protocol.status import FAILING, Status, WorkerStatus

# A server in one of these has left service by something that went wrong.
_OUT = (ServerState.STALE, ServerState.QUARANTINED, ServerState.DOWN)
# A worker that was not heard from for so long is missing, seconds.
_QUIET_S = 25.0
# The run stands still where a step takes so many times the usual, and so many seconds more at least.
_SLOW, _SLOW_S = 3.0, 20.0
# Between two statuses of one queue: more seconds of the machine's clock than the queue ran are a clock that was set.
_CLOCK_SET_S = 120.0
_YOUNG_S = 30.0
# Characters of what is shown of a text.
_SHOWN_CHARACTERS = 160
# Kinds of incidents that are shown by themselves, those that cost most.
_SHOWN = 8
# The column of a reward function, or of a role.
_OF_REWARD = re.compile(r"rewards/(.+)/mean")


class Incident(msgspec.Struct):
    """Something that went wrong for a while.

    Attributes:
        about: Such as `server vllm-1`.
        text: What was wrong, as it was said first.
        began, ended: Wall clock, seconds; `ended` is None if it had not ended when the run was last heard of.
        lost_s: Seconds without a step meanwhile, beyond what a step takes.
        steps_again: Steps that were made again.
    """

    about: str
    text: str
    began: float
    ended: float | None = None
    lost_s: float = 0.0
    steps_again: int = 0

    def seconds(self, now: float) -> float:
        return max(0.0, (now if self.ended is None else self.ended) - self.began)


class RunSummary(msgspec.Struct):
    """A run in short.

    Attributes:
        head: Lines on what it did.
        steps: Steps that it made.
        incidents: In the order of time.
        lost_s: Seconds in which the run stood still, of `wall_s`.
        open: What is not as it should be; empty if all is well.
    """

    run: str
    head: list[str]
    steps: int
    incidents: list[Incident]
    lost_s: float
    wall_s: float
    open: list[str]


def summary(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run's directory, or its run file")],
    as_json: AsJson = False,
) -> None:
    """Say in ten lines what happened in a run, what it cost, and what is wrong."""
    found = read(run_dir_of(run))
    if as_json:
        print_json(found)
    else:
        Console(highlight=False, soft_wrap=True).print(render(found))


def read(run_dir: Path) -> RunSummary:
    """Summarise a run by its directory. Raises `ConfigError` if it is none."""
    data, record = read_run(run_dir), _Record()
    for entry in history.read(run_dir / history.FOLDER):
        record.add(entry)
    incidents, lost_s = record.finish()
    began, ended = record.began or data.now, record.newest_at or data.now
    wall_s = max(0.0, ended - began)
    head = [*_head(data, began, ended), *_costs(data, lost_s, wall_s)]
    return RunSummary(data.run, head, _steps(data), incidents, lost_s, wall_s, list(_left_open(data, incidents)))


def tell(run_dir: Path) -> None:
    """Print what happened in a run that has just ended, if anything did. A run does not fail by its summary.

    Of a run that made no step, the error that ended it says everything.
    """
    try:
        found = read(run_dir)
    except ConfigError:  # it ended before it made a step
        return
    except Exception as error:
        typer.echo(f"slipstream: no summary of {run_dir}: {type(error).__name__}: {error}", err=True)
        return
    if found.incidents and found.steps:
        Console(stderr=True, highlight=False, soft_wrap=True).print(render(found))


def render(found: RunSummary) -> Text:
    """Render a summary for people."""
    lines = Text()
    lines.append(f"run {printable(found.run)}: ", "bold")
    lines.append("\n".join(found.head))
    kinds = _kinds(found.incidents)
    now = max((incident.ended or incident.began for incident in found.incidents), default=0.0)
    if kinds:
        dearest = sorted(kinds, key=lambda kind: kind.cost(now), reverse=True)[:_SHOWN]
        lines.append("\nwhat happened:", "bold")
        for kind in sorted(dearest, key=lambda kind: kind.incidents[0].began):
            lines.append("\n  " + printable(kind.describe(now)))
        if rest := len(kinds) - len(dearest):
            lines.append(f"\n  and {rest} other{'s' if rest > 1 else ''} that cost less: slipstream report")
    if found.open:
        lines.append("\nnot as it should be:", "bold")
        for text in found.open:
            lines.append("\n  " + printable(text), "red")
    else:
        lines.append("\nall is as it should be", "green")
    return lines


class _Record:
    """Follows a history, entry by entry: incidents, and the times of steps."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.newest_at: float | None = None
        self._before: Status | None = None
        self._open: dict[str, Incident] = {}
        self._closed: list[Incident] = []
        self._steps: list[tuple[float, int]] = []
        # Seconds by which the machine's clock was set while the queue ran, all steps together.
        self._set_by = 0.0
        # Restarts of the queue, until the learner is known to be the same or a new one.
        self._restarts: list[Incident] = []
        # Servers that have served in this life of queue and learner.
        self._served: set[str] = set()
        # When neither queue nor learner ran, and no step was lost: a person had stopped the run, or its machine.
        self._stops: list[tuple[float, float]] = []
        # Steps of entries without a status.
        self._rows: list[history.Row] = []

    def add(self, entry: Entry) -> None:
        self._rows += entry.steps
        status, before, since = entry.status, self._before, self.newest_at
        if status is None:  # its steps are timed with the next one's
            return
        was_set_by = self._set_by
        if before is not None and since is not None and _is_one_life(before, status):
            ran = status.uptime_s - before.uptime_s
            if (jump := entry.at - self._set_by - since - ran) >= _CLOCK_SET_S:
                self._set_by += jump
                text = (
                    f"went ahead by {_span(jump)}: it was set, or the machine slept; later times are by the one before"
                )
                self._closed.append(Incident("the clock", text, since, since))
        at = entry.at - self._set_by
        for row in self._rows:
            stepped = (row.get("at") or entry.at) - was_set_by
            self._step(stepped if stepped <= at else stepped + was_set_by - self._set_by, int(row.get("step") or 0))
        rows, self._rows = self._rows, []
        self.began = at if self.began is None else self.began
        if before is not None and since is not None:
            self._closed += self._tell_stop(before, status, [*_at_once(before, status, since, at, rows)])
        if before is None or not _is_one_life(before, status) or status.learner.session != before.learner.session:
            self._served.clear()
        wrong = dict(_wrong(status, at, self._served))
        self._served |= {server.name for server in status.servers if server.state is ServerState.SERVING}
        if status.finished:  # processes end; what was wrong may still be
            wrong = {about: of for about, of in wrong.items() if about in self._open}
        for about in self._open.keys() - wrong.keys():
            incident = self._open.pop(about)
            incident.ended = max(incident.began, _back_since(about, status, at))
            self._closed.append(incident)
        for about, (text, began) in wrong.items():
            self._open.setdefault(about, Incident(about, text, began))
        if not rows and status.step:
            self._step(at, status.step)
        self._before, self.newest_at = status, at

    def _tell_stop(self, before: Status, after: Status, found: list[Incident]) -> list[Incident]:
        """Tell a run that was stopped and continued, where it was, from a queue and a learner that crashed."""
        if restarts := [of for of in found if of.about == "the queue"]:
            self._restarts += restarts
        elif after.learner.session == before.learner.session and after.step > before.step:
            self._restarts.clear()
        if not self._restarts or after.learner.session <= before.learner.session:
            return found
        again = sum(of.steps_again for of in found)
        for restart in self._restarts:
            restart.about, restart.text = "the run", "was stopped, and continued"
            if not again:
                self._stops.append((restart.began, restart.ended or restart.began))
        self._restarts[-1].steps_again = again
        self._restarts.clear()
        return [of for of in found if of.about != "the learner"]

    def _step(self, at: float, step: int) -> None:
        if not self._steps or self._steps[-1][1] != step:
            self._steps.append((at, step))

    def finish(self) -> tuple[list[Incident], float]:
        """Return the incidents in the order of time, and the seconds in which the run stood still."""
        incidents = sorted([*self._closed, *self._open.values()], key=lambda incident: incident.began)
        usual, stood = _standstills(self._steps)
        lost_s = 0.0
        for began, ended in stood:
            stopped_s = sum(max(0.0, min(ended, until) - max(began, since)) for since, until in self._stops)
            span_s = max(0.0, ended - began - usual - stopped_s)
            lost_s += span_s
            during = [of for of in incidents if of.began <= ended and (of.ended is None or of.ended >= began)]
            if not during:
                during = [Incident("the run", "no step, and nothing that was seen says why", began, ended)]
                incidents += during
            for incident in during:
                incident.lost_s += span_s
        return sorted(incidents, key=lambda incident: incident.began), lost_s


def _is_one_life(before: Status, after: Status) -> bool:
    """Return whether two statuses, one after the other, are of one process of the queue: a new one's first is young."""
    return _YOUNG_S <= before.uptime_s <= after.uptime_s


def _wrong(status: Status, at: float, served: Collection[str]) -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield what is wrong in a status: about what, in words, and since when. `served`: servers that have served, and so
    ended if they join."""
    for server in status.servers:
        if server.state in _OUT or (server.state is ServerState.JOINING and server.name in served):
            why = f"{server.state}: {server.reason}" if server.reason else str(server.state)
            yield f"server {server.name}", (why, at - server.since_s)
    for worker in status.workers:
        if missing := _missing(worker):
            yield f"worker {worker.worker_id}", (missing, at - worker.seen_s_ago)
    if status.stall.stalled:
        yield "the run", (f"no step: {status.stall.why or 'the cause is not known'}", at - status.stall.since_s)
    for cause in status.diagnosis:
        if cause.severity == "bad":
            yield cause.about, (cause.text, at - cause.since_s)


def _back_since(about: str, status: Status, at: float) -> float:
    """Return when what was wrong had ended, as a status of `at` shows it."""
    serving = (of for of in status.servers if about == f"server {of.name}")
    return at - next((of.since_s for of in serving), 0.0)


def _missing(worker: WorkerStatus) -> str | None:
    if worker.does == "refused":
        return f"refused: {worker.reason}"
    if worker.does != "left" and worker.seen_s_ago >= _QUIET_S:
        return "not heard from: it was killed, hangs, or cannot reach the queue"
    return None


def _at_once(before: Status, after: Status, since: float, at: float, rows: Sequence[history.Row]) -> Iterator[Incident]:
    """Yield what happened between two statuses of `since` and `at`. `rows` are the steps between them."""
    resumed_at = _resumed_at(after.step, [int(row.get("step") or 0) for row in rows])
    again = max(0, before.step - resumed_at)
    if after.uptime_s < before.uptime_s:
        up = max(since, at - after.uptime_s)
        yield Incident("the queue", "ended, and was started again", since, up)
    if before.learner.session and after.learner.session > before.learner.session:
        text = f"ended after step {before.step}, and continued from step {resumed_at}"
        yield Incident("the learner", text, since, at, steps_again=again)
    elif again:
        text = f"went back from step {before.step} to {resumed_at}"
        yield Incident("the run", text, since, at, steps_again=again)
    were = {worker.worker_id: worker for worker in before.workers}
    for worker in after.workers:
        was = were.get(worker.worker_id)
        if was is not None and not worker.is_gone and 0 < was.pid != worker.pid > 0:
            text = "its process had ended without a word, and was started again"
            yield Incident(f"worker {worker.worker_id}", text, since, at)


def _resumed_at(step: int, made: Sequence[int]) -> int:
    """Return the step from which the newest life of a learner continued: the one before the first that it made."""
    if not made or step < made[-1]:  # it has made none yet
        return step
    return next((later for earlier, later in reversed([*pairwise(made)]) if later <= earlier), made[0]) - 1


def _standstills(steps: Sequence[tuple[float, int]]) -> tuple[float, list[tuple[float, float]]]:
    """Return the seconds that a step usually takes, and the spans between two steps that took far longer."""
    spans = list(pairwise(at for at, _ in steps))
    if len(spans) < 2:
        return 0.0, []
    usual = median(later - earlier for earlier, later in spans)
    longest = max(_SLOW * usual, usual + _SLOW_S)
    return usual, [(earlier, later) for earlier, later in spans if later - earlier > longest]


@dataclass
class _Kind:
    """Incidents that are alike."""

    incidents: list[Incident] = field(default_factory=list)

    def cost(self, now: float) -> tuple[float, float]:
        return sum(of.lost_s for of in self.incidents), sum(of.seconds(now) for of in self.incidents)

    def describe(self, now: float) -> str:
        first, count = self.incidents[0], len(self.incidents)
        lost_s, seconds = self.cost(now)
        again = sum(of.steps_again for of in self.incidents)
        parts = [f"{_clock(first.began)}  {first.about}: {_brief(first.text)}"]
        if count > 1:
            parts.append(f"{count} times, the last at {_clock(self.incidents[-1].began)}")
        lasts = self.incidents[-1].ended is None
        if seconds >= 1 or not lasts:
            parts.append(f"{_span(seconds)}{' in all' if count > 1 else ''}")
        if lasts:
            parts.append("and still")
        if again:
            parts.append(f"{again} step{'s' if again > 1 else ''} made again")
        if lost_s >= 1:
            parts.append(f"{_span(lost_s)} without a step")
        return ", ".join(parts)


def _kinds(incidents: Iterable[Incident]) -> list[_Kind]:
    found: dict[tuple[str, str], _Kind] = {}
    for incident in incidents:
        found.setdefault((incident.about, _alike(incident.text)), _Kind()).incidents.append(incident)
    return list(found.values())


def _head(data: PageData, began: float, ended: float) -> Iterator[str]:
    status, steps = data.status, _steps(data)
    how = "finished" if status is not None and status.finished else "not finished"
    of = f" of {status.total_steps}" if status is not None and status.total_steps else ""
    yield f"{how}, {steps}{of} steps in {_span(ended - began)}, {_clock(began)} to {_clock(ended)}"
    rewards = [value for value in data.steps.get("reward", []) if value is not None]
    evaluated = [of.reward for of in data.evaluations if of.reward is not None]
    parts = []
    if ends := ends_of(rewards):
        parts.append(f"reward {ends}")
    if evaluated:
        parts.append(f"evaluations {evaluated[0]:.3f} to {evaluated[-1]:.3f}, best {max(evaluated):.3f}")
    if parts:
        yield "; ".join(parts)
    if len(by_name := _reward_functions(data)) > 1:
        yield "; ".join(f"{printable(name)} {of.first:.3f} to {of.last:.3f}" for name, of in by_name.items())


def _steps(data: PageData) -> int:
    return int(_newest(data, "step") or (data.status.step if data.status is not None else 0))


def _reward_functions(data: PageData) -> dict[str, history.Ends]:
    """Return the mean of each reward function, or role, at the first steps and at the last."""
    found = {}
    for column, values in data.steps.items():
        known = [value for value in values if value is not None]
        if (ends := ends_of(known)) and (named := _OF_REWARD.fullmatch(column)):
            found[named[1]] = ends
    return found


def _costs(data: PageData, lost_s: float, wall_s: float) -> Iterator[str]:
    status = data.status
    if status is None:
        return
    trained = sum(value or 0 for value in data.steps.get("tokens_trained", []))
    sampled = status.tokens_sampled
    parts = [f"{sampled:,} tokens sampled"]
    if sampled:
        parts.append(f"{min(1.0, trained / sampled):.0%} of them trained")
    lost = {reason: count for reason, count in status.drops.items() if reason != reasons.RUN_FINISHED}
    if lost:
        shown = sorted(lost.items(), key=lambda item: -item[1])[:3]
        parts.append(f"{sum(lost.values()):,} groups dropped ({', '.join(f'{n:,} {reason}' for reason, n in shown)})")
    parts.append(
        f"stood still for {_span(lost_s)}, {lost_s / wall_s:.0%}" if wall_s and lost_s else "never stood still"
    )
    yield ", ".join(parts)
    if status.limit is not None:
        yield status.limit.text


def _left_open(data: PageData, incidents: Sequence[Incident]) -> Iterator[str]:
    """Yield what is not as it should be at the end."""
    status = data.status
    if status is None:
        yield "its queue kept no history/, so what happened is not known"
        return
    if status.gave_up:
        yield f"the run was given up: {status.gave_up}"
    elif not status.finished:
        kept = "no checkpoint" if status.checkpoint_step is None else f"a checkpoint of step {status.checkpoint_step}"
        made = f"{status.step} of {status.total_steps} steps are made, with {kept}"
        lower = f" with --resume {REMEDY}" if any(cause.about == CAUSE for cause in status.diagnosis) else " --resume"
        yield f"{made}; if it was stopped, slipstream up{lower} continues"

    def is_said(about: str) -> bool:
        """Return whether it stands in the reason for which the run was given up."""
        return bool(status.gave_up) and about.startswith(FAILING)

    said = set()
    for incident in incidents:
        if incident.ended is None and not is_said(incident.about):
            said.add(_alike(incident.text))
            yield f"{incident.about}: {incident.text}"
    for cause in status.diagnosis:
        if _alike(cause.text) not in said and not is_said(cause.about):
            yield cause.text


def _alike(text: str) -> str:
    """Return what is the same in texts that differ in numbers only."""
    return "".join(letter for letter in text if not letter.isdigit())


def _brief(text: str) -> str:
    """Return the first sentence of a text, cut where it is long."""
    first = text.partition(". ")[0]
    return first if len(first) <= _SHOWN_CHARACTERS else f"{first[:_SHOWN_CHARACTERS]}..."


def _newest(data: PageData, name: str) -> float | None:
    column = data.steps.get(name) or [None]
    return column[-1]


def _clock(at: float) -> str:
    return time.strftime("%a %H:%M:%S", time.localtime(at))


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
