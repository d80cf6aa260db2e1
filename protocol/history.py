"""The history of a run: its status over time and the events in it, on disk, as columns for charts, and as page data.

The queue writes it into the run directory while the run continues; the page shows it, and `slipstream report` reads it
when the run is over.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec

from slipstream.protocol.messages import LearnerReport
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import Evaluation, Status, WorkerActivity, episodes_at

FOLDER = "history"

# Parts are gzip files of JSON lines. The second number says how often entries of the part were thinned out.
_PART = re.compile(r"(?P<number>\d{6})-(?P<thinned>\d+)\.jsonl\.gz")

_CHUNK_BYTES = 64 * 1024

# Bytes of a part that are read: a queue writes a hundredth of it.
_MAX_BYTES = 2**30

# Characters of a line in which it says what it is.
_HEAD = 64

# Points of a column: of a longer run every second one is left out, as often as needed.
MAX_POINTS = 2000

# Steps at each end of a run whose mean is shown.
MAX_END = 10

EventKind = Literal["run", "learner", "server", "worker", "evaluation", "notice", "change"]

Row = dict[str, float | None]


class Ends(NamedTuple):
    """Mean of a figure over the first `over` steps of a run, and over its last."""

    first: float
    last: float
    over: int

    def __str__(self) -> str:
        of = "step" if self.over == 1 else f"{self.over} steps"
        return f"{self.first:.3f} over its first {of}, {self.last:.3f} over its last"


def ends_of(values: Sequence[float]) -> Ends | None:
    """Return both means: over at most 10 values, and at most half of them, so that none counts in both. None without
    values."""
    if not values:
        return None
    over = max(1, min(MAX_END, len(values) // 2))
    return Ends(fmean(values[:over]), fmean(values[-over:]), over)


class Event(msgspec.Struct, frozen=True):
    """Something that happened; a `change` is a setting, a tool or a figure that is another from a step on.

    `at`: wall clock, seconds; `who`: the server, worker or process that it is about; `step`: the newest then, or from
    which on.
    """

    at: float
    kind: EventKind
    text: str
    who: str | None = None
    step: int | None = None


class Entry(msgspec.Struct, omit_defaults=True, frozen=True):
    """A line of the history: the status at a time with the steps since the status before, or an event."""

    at: float
    status: Status | None = None
    event: Event | None = None
    steps: list[Row] = []


class Part(msgspec.Struct, frozen=True, order=True):
    """A file of the history. Its entries are newer than those of the parts with lower numbers."""

    number: int
    thinned: int
    path: Path

    @classmethod
    def named(cls, folder: Path, number: int, thinned: int = 0) -> Part:
        return cls(number, thinned, folder / f"{number:06}-{thinned}.jsonl.gz")


def parts(folder: Path) -> list[Part]:
    """Return the parts in a folder, oldest first. Of one that was being thinned out, the whole one."""
    found: dict[int, Part] = {}
    for path in sorted(folder.glob("*.jsonl.gz"), reverse=True):
        if (name := _PART.fullmatch(path.name)) is not None and path.is_file():
            part = Part(int(name["number"]), int(name["thinned"]), path)
            found[part.number] = part
    return sorted(found.values())


def read(folder: Path) -> Iterator[Entry]:
    """Yield the entries of a history in the order of time, as far as each part can be read."""
    order = Order()
    for part in parts(folder):
        yield from map(order.moved, read_part(part.path))


class Order:
    """Moves entries of a clock that was set back, so that each stands where it was written, behind the one before.

    Attributes:
        newest: Time of the newest entry, wall clock, seconds; None before the first.
    """

    def __init__(self) -> None:
        self.newest: float | None = None
        self._by_s = 0.0

    def moved(self, entry: Entry) -> Entry:
        """Return the next entry."""
        if self.newest is not None and entry.at + self._by_s < self.newest:
            self._by_s = self.newest - entry.at
        self.newest = at = entry.at + self._by_s
        if not self._by_s:
            return entry
        event = entry.event and msgspec.structs.replace(entry.event, at=at)
        steps = [row | {"at": (row.get("at") or entry.at) + self._by_s} for row in entry.steps]
        return msgspec.structs.replace(entry, at=at, event=event, steps=steps)


def read_part(path: Path, every: int = 1) -> Iterator[Entry]:
    """Yield the entries of one part: a process that was killed leaves its end cut off. Lines that are no entry, as of
    a newer release, are left out.

    Args:
        every: Of how many statuses one is yielded; events all are.
    """
    statuses = 0
    decode = msgspec.json.Decoder(Entry)
    for line in _lines(path):
        is_status = _is_status(line)
        statuses += is_status
        if not is_status or not statuses % every:
            with suppress(msgspec.DecodeError):
                yield decode.decode(line)


def newest_status(folder: Path) -> tuple[float, Status] | None:
    """Return the newest status of a history and its time; None if it has none. Decodes nothing else."""
    for part in reversed(parts(folder)):
        newest = None
        for line in _lines(part.path):
            newest = line if _is_status(line) else newest
        with suppress(msgspec.DecodeError):
            if newest is not None and (entry := msgspec.json.decode(newest, type=Entry)).status is not None:
                return entry.at, entry.status
    return None


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a part, as far as it can be read."""
    decoder, rest, size = zlib.decompressobj(wbits=47), b"", 0
    with suppress(OSError, zlib.error), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            while chunk and size < _MAX_BYTES:
                found = decoder.decompress(chunk, _CHUNK_BYTES)
                chunk, size = decoder.unconsumed_tail, size + len(found)
                *lines, rest = (rest + found).split(b"\n")
                yield from lines


def _is_status(line: bytes) -> bool:
    return b'"status":' in line[:_HEAD]


class Columns:
    """Rows of numbers as columns, at most `MAX_POINTS` of each: then every second one is left out.

    Args:
        key: The column that orders the rows. A row of the same key replaces the one before.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._rows: list[Row] = []
        self._every = 1
        self._count = 0

    def add(self, row: Row) -> None:
        rows, key = self._rows, row[self._key]
        if rows and key == rows[-1][self._key]:
            rows[-1] = row
            return
        # The newest row is always kept, until the next one comes.
        if rows and (self._count - 1) % self._every:
            rows[-1] = row
        else:
            rows.append(row)
        self._count += 1
        if len(rows) > MAX_POINTS:
            del rows[1::2]
            self._every *= 2

    def forget_from(self, key: float) -> None:
        """Forget rows from a key on, as when a run was resumed at an earlier step."""
        while self._rows and (self._rows[-1][self._key] or 0) >= key:
            self._rows.pop()

    def json(self) -> dict[str, list[float | None]]:
        names = dict.fromkeys(name for row in self._rows for name in row)
        return {name: [row.get(name) for row in self._rows] for name in names}


_DOES: tuple[WorkerActivity, ...] = ("generating", "waiting", "in_tools", "in_judgement", "idle")


def time_row(at: float, status: Status) -> Row:
    """Return a status as a row of the columns over time."""
    groups, staleness, rates = status.groups, status.staleness, status.rates
    there = [worker for worker in status.workers if not worker.is_gone]
    does = Counter(worker.does for worker in there)
    row: Row = {
        "at": at,
        "version": status.version,
        "step": status.step,
        "depth": status.depth,
        "depth_target": status.depth_target,
        "tickets": groups.tickets,
        "ready": groups.ready,
        "leased": groups.leased,
        "limit": groups.limit,
        "capacity_groups": groups.capacity_groups,
        "bytes": groups.bytes,
        "staleness_mean": staleness.mean,
        "staleness_max": staleness.max,
        "staleness_in_flight": staleness.in_flight_mean,
        "staleness_in_queue": staleness.in_queue_mean,
        "rate_groups": rates.groups,
        "rate_tokens_sampled": rates.tokens_sampled,
        "rate_tokens_trained": rates.tokens_trained,
        "rate_steps": rates.steps,
        "workers": len(there),
        **{f"workers_{name}": does[name] for name in _DOES},
        "episodes_open": sum(episodes_at(there).values()),
        "servers": len(status.servers),
        "servers_serving": sum(server.state == "serving" for server in status.servers),
        "learner_wait_share": status.learner.wait_share,
        "worker_wait_share": status.worker_wait_share,
        "drops_total": sum(status.drops.values()),
        "rejections_total": sum(status.rejections.values()),
    }
    row |= {f"drop/{reason}": count for reason, count in status.drops.items()}
    return row


def reported_row(at: float, report: LearnerReport) -> Row:
    """Return a step that the learner reported as a row of the columns over steps."""
    return {"step": report.step, "at": at, "step_time": report.step_s, "wait_s": report.wait_s, **report.metrics}


def step_row(at: float, status: Status) -> Row | None:
    """Return the newest step of a status as a row of the columns over steps; None before the first."""
    learner = status.learner
    if not learner.step or not learner.metrics:
        return None
    waits = None if learner.wait_share is None or learner.step_s is None else learner.wait_share * learner.step_s
    return {"step": learner.step, "at": at, "step_time": learner.step_s, "wait_s": waits, **learner.metrics}


class RunColumns:
    """A run as columns over wall time and over optimiser steps."""

    def __init__(self) -> None:
        self.time, self.steps = Columns("at"), Columns("step")
        self._step = 0

    def add(self, at: float, status: Status) -> tuple[Row, Row | None]:
        """Add the status as of `at`, wall clock, seconds. Returns the new rows; None for a step that is known."""
        row, step = time_row(at, status), step_row(at, status)
        self.time.add(row)
        return row, step if step is not None and self.add_step(step) else None

    def add_step(self, step: Row) -> bool:
        """Add the row of a step, behind those before it. Returns False if it is the newest one already."""
        if step["step"] == self._step:
            return False
        number = int(step["step"] or 0)
        if number < self._step:
            self.steps.forget_from(number)
        self._step = number
        self.steps.add(step)
        return True


class PlanNode(msgspec.Struct, frozen=True):
    """A part of the loop in a plan. `shares`: of its time, by what it does; `lines`: two, below its main figure."""

    big: str
    lines: list[str]
    shares: list[tuple[str, float]] = []


class PlannedChange(msgspec.Struct, frozen=True):
    """A change and what it would bring. `gain`: of steps a second, as a share, 0 if it cannot be told from chance; the
    texts are for people."""

    text: str
    gain: float
    shown_gain: str
    steps_per_s: str
    staleness: str


class PlanView(msgspec.Struct, frozen=True):
    """A plan as the page shows it, in words for people.

    Attributes:
        weights: How often new weights come.
        nodes: Of servers, workers, queue and learner.
        figures: Name, predicted value, and the one in the record.
        changes: The best first.
    """

    title: str
    advice: str
    weights: str
    nodes: dict[str, PlanNode]
    figures: list[tuple[str, str, str]]
    changes: list[PlannedChange]
    notes: list[str]


class PageData(msgspec.Struct):
    """Everything that the page shows: of a run under way, of one that is over, or of one that is planned.

    Attributes:
        now: Wall clock as of which it is, seconds.
        statuses: The state at some seconds, for the time slider; empty for a run under way.
        time, steps: Columns over wall time and over optimiser steps.
        compare: `run`, `time` and `steps` of another run.
        plan: Of a run that is planned; `status` has its rates and waits then.
    """

    run: str
    live: bool
    now: float
    max_staleness: int
    group_size: int
    groups_per_step: int
    status: Status | None = None
    statuses: list[tuple[float, Status]] = []
    time: Mapping[str, list[float | None]] = {}
    steps: Mapping[str, list[float | None]] = {}
    events: list[Event] = []
    rollouts: list[RolloutView] = []
    evaluations: list[Evaluation] = []
    compare: Mapping[str, Any] | None = None
    plan: PlanView | None = None
