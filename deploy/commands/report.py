"""`slipstream report`: one file that shows a run that is over, from its run directory alone."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import time
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import typer

from slipstream.deploy.commands.arguments import AsJson, print_json
from slipstream.deploy.commands.ended import METRICS, causes_at_end, modified
from slipstream.protocol import history
from slipstream.protocol.codec import read_json_lines
from slipstream.protocol.config import ConfigError, load
from slipstream.protocol.history import Columns, Event, PageData, Row, RunColumns
from slipstream.protocol.rollouts import FILE_NAME as ROLLOUTS
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Evaluation, Limit, Status
from slipstream.rollout_queue import page
from slipstream.rollout_queue.observe.changes import ChangeFinder

EVALUATIONS, RUN_FILE = "evaluations.jsonl", "run.toml"

# States of the slider, events and rollouts that a report holds. Of more, every second one is left out as often as
# needed; of events the oldest go.
MAX_STATUSES = 2000
MAX_EVENTS = 5000
MAX_ROLLOUTS = 20_000
# Characters of what they say.
MAX_TEXT = 200_000_000

# No metric is so large, and a float could not be.
_HUGE = 1e300

T = TypeVar("T")
S = TypeVar("S")


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run's directory, or its run file")],
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="another run, drawn in dashed lines next to it")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="default: report.html in the run's directory")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that shows a run: finished, crashed, or copied from elsewhere."""
    run_dir = run_dir_of(run)
    out = out or run_dir / "report.html"
    other = run_dir_of(compare) if compare is not None else None
    if other is not None and other.resolve() == run_dir.resolve():
        raise ConfigError(f"--compare {compare}: it is the run itself; name another one")
    data = write(run_dir, out, other)
    steps, rollouts, states = len(data.steps.get("step", [])), len(data.rollouts), len(data.statuses)
    size = out.stat().st_size
    if as_json:
        print_json({"file": str(out), "steps": steps, "rollouts": rollouts, "states": states, "bytes": size})
        return
    typer.echo(f"{out}: {steps} steps, {rollouts} rollouts, {states} states, {size / 1e6:.1f} MB; open it in a browser")
    if not states:
        why = "nothing of its history/ can be read" if (run_dir / history.FOLDER).exists() else "it kept no history/"
        typer.echo(f"It has no time slider: {why}")


def write(run_dir: Path, out: Path, compare: Path | None = None) -> PageData:
    """Write the report of a run. Returns what it shows.

    Raises:
        ConfigError: The directory holds nothing of a run, or the file cannot be written.
    """
    data = read_run(run_dir)
    if compare is not None:
        other = read_run(compare)
        data.compare = {"run": other.run, "time": other.time, "steps": other.steps}
    save(data, out)
    return data


def save(data: PageData, out: Path) -> None:
    """Write the page with its data as one file. Raises `ConfigError` if it cannot be written."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{out}: the page is written as a file that ends in .html: give it such a name with -o")
    try:
        out.write_text(as_one_file(data), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; choose another place with -o") from error


def read_run(run_dir: Path) -> PageData:
    """Read what a run left behind. Each of its files may be missing, cut off at its end, or from a killed process.

    Raises:
        ConfigError: It is no run directory.
    """
    if not any((run_dir / name).exists() for name in (METRICS, ROLLOUTS, history.FOLDER)):
        raise ConfigError(
            f"{run_dir}: holds neither {METRICS} nor {history.FOLDER}/: give the directory of a run that has made a "
            f"step, such as runs/NAME"
        )
    settings = _settings(run_dir / RUN_FILE)
    statuses, columns = _Sample[tuple[float, Status]](MAX_STATUSES), RunColumns()
    events: list[Event] = []
    newest: tuple[float, Status] | None = None
    limit: Limit | None = None
    for entry in history.read(run_dir / history.FOLDER):
        if entry.status is not None:
            newest = entry.at, entry.status
            limit = entry.status.limit or limit
            statuses.add(newest)
            columns.add(*newest)
        if entry.event is not None:
            events.append(entry.event)
            del events[: -2 * MAX_EVENTS]
    if newest is not None:
        newest = newest[0], _as_it_ended(run_dir, newest[1], limit)
        last_at, last = statuses.kept[-1]
        statuses.kept[-1] = last_at, _as_it_ended(run_dir, last, limit)
    rollouts = _Sample[RolloutView](MAX_ROLLOUTS, MAX_TEXT, _characters)
    for view in read_json_lines(run_dir / ROLLOUTS, RolloutView):
        rollouts.add(view)
    steps = _steps(run_dir / METRICS, columns.steps.json(), columns.time.json())
    return PageData(
        run=_setting(settings, "run", "name", run_dir.resolve().name),
        live=False,
        now=newest[0] if newest is not None else modified(run_dir / METRICS) or time.time(),
        max_staleness=_setting(settings, "queue", "max_staleness", 4),
        group_size=_setting(settings, "rollout", "group_size", 8),
        groups_per_step=_setting(settings, "learner", "groups_per_step", 16),
        status=newest[1] if newest is not None else None,
        statuses=statuses.kept,
        time=columns.time.json(),
        steps=steps,
        events=_with_changes(events, steps)[-MAX_EVENTS:],
        rollouts=rollouts.kept,
        evaluations=list(read_json_lines(run_dir / EVALUATIONS, Evaluation)),
    )


def _with_changes(events: list[Event], steps: Mapping[str, list[float | None]]) -> list[Event]:
    """Return the events, with what the steps' figures say of changes where the run's queue told of none."""
    if any(event.kind == "change" for event in events) or "step" not in steps:
        return events
    finder, names = ChangeFinder(), list(steps)
    rows = (dict(zip(names, values, strict=True)) for values in zip(*steps.values(), strict=True))
    found = [jump.event() for row in rows for jump in finder.step(row)]
    return sorted([*events, *found], key=lambda event: event.at)


def _as_it_ended(run_dir: Path, status: Status, limit: Limit | None) -> Status:
    """Return the status with what kept the run from learning by its end, which the queue did not live to see, and with
    what limited it last."""
    return msgspec.structs.replace(status, diagnosis=causes_at_end(run_dir, status), limit=limit)


def as_one_file(data: PageData) -> str:
    """Return the page with its files and its data in it. It needs no network, and runs no other script."""
    files = page.files()
    scripts: list[bytes] = []

    def script(found: re.Match[str]) -> str:
        # Whatever ends a script in the middle of it would end it in the file.
        body = files[found["name"]].replace(b"</script", b"<\\/script")
        scripts.append(body)
        return f"<script>{body.decode()}</script>"

    def style(found: re.Match[str]) -> str:
        return f"<style>{files[found['name']].decode()}</style>"

    html = files[page.INDEX].decode()
    # Those that load later need not wait here, and stand before what uses them.
    html = re.sub(r'<script src="page/(?P<name>[\w.]+)"[^>]*></script>', script, html)
    html = re.sub(r'<link rel="stylesheet" href="page/(?P<name>[\w.]+)">', style, html)
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(data), 6)).decode()
    element = f'<script type="application/json" id="data" data-encoding="gzip">{packed}</script>'
    html = html.replace('<div id="root">', f'{element}\n<div id="root">', 1)
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body).digest()).decode()}'" for body in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return html.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)


def _characters(view: RolloutView) -> int:
    return sum(len(str(message)) for message in view.messages or ())


class _Sample(Generic[T]):
    """Keeps at most `most` of what is added, evenly: of more, every second one is left out, as often as needed.

    Args:
        most_size: Of all that is kept together, as `size_of` measures each.
    """

    def __init__(self, most: int, most_size: int = 0, size_of: Callable[[T], int] = lambda _: 0) -> None:
        self.kept: list[T] = []
        self._most = most
        self._most_size = most_size
        self._size_of = size_of
        self._size = 0
        self._every = 1
        self._count = 0

    def add(self, value: T) -> None:
        if self._count % self._every == 0:
            self.kept.append(value)
            self._size += self._size_of(value)
        self._count += 1
        while len(self.kept) > max(1, self._most) or (self._size > self._most_size and len(self.kept) > 1):
            self._size -= sum(map(self._size_of, self.kept[1::2]))
            del self.kept[1::2]
            self._every *= 2


def run_dir_of(given: Path) -> Path:
    """Return the directory of a run that is named by it or by its run file."""
    if given.is_file():
        return load(str(given), []).run_dir
    if not given.is_dir():
        raise ConfigError(f"{given}: there is no such directory; give the directory of a run, such as runs/NAME")
    return given


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _setting(settings: Mapping[str, Any], section: str, name: str, default: S) -> S:
    """Return a setting of a run file that may be anybody's; the default where it is of another type."""
    of = settings.get(section)
    found = of.get(name) if isinstance(of, dict) else None
    return found if isinstance(found, type(default)) else default


def _steps(
    path: Path, seen: Mapping[str, list[float | None]], time: Mapping[str, list[float | None]]
) -> Mapping[str, list[float | None]]:
    """Return the steps' metrics: those of the learner's file, with the times at which the queue saw them.

    Args:
        seen: Columns over steps, as the queue saw them.
        time: Columns over wall time.
    """
    at = _StepTimes(time)
    columns = Columns("step")
    for line in read_json_lines(path, dict[str, Any]):
        row: Row = {name: float(value) for name, value in line.items() if _is_number(value)}
        if "step" in row:
            columns.add({**row, "at": at.of(row["step"] or 0.0)})
    found = columns.json()
    return found if found else seen


class _StepTimes:
    """The times of steps, from columns over wall time.

    A step that the queue did not see by itself lies between the last time at which it saw an earlier one and the first
    at which it saw a later one: not within a stop of the run.
    """

    def __init__(self, time: Mapping[str, list[float | None]]) -> None:
        spans: dict[float, tuple[float, float]] = {}
        for step, at in zip(time.get("step", []), time.get("at", []), strict=False):
            if step is None or at is None:
                continue
            if step not in spans:  # a resumed run makes steps again
                spans = {known: span for known, span in spans.items() if known < step}
            spans[step] = spans.get(step, (at, at))[0], at
        self._steps = sorted(spans)
        self._spans = spans

    def of(self, step: float) -> float | None:
        """Return the time of a step, wall clock, seconds; None if no time is known."""
        if not self._steps:
            return None
        place = bisect_left(self._steps, step)
        if place == len(self._steps):
            return self._spans[self._steps[-1]][1]
        later = self._steps[place]
        if place == 0 or later == step:
            return self._spans[later][0]
        earlier = self._steps[place - 1]
        share = (step - earlier) / (later - earlier)
        began, ended = self._spans[earlier][1], self._spans[later][0]
        return began + share * (ended - began)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE
