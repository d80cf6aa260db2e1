"""Keeps the history of the run: in memory as columns and events for its page, and on disk within a bound.

A part of the history that is too much is thinned out: every second status goes, of the oldest parts first, so that all
of the run is there and its newest hours are finest.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.protocol import history, reasons
from slipstream.protocol.history import Entry, Event, EventKind, Part, Row, RunColumns
from slipstream.protocol.status import ServerStatus, Status, WorkerStatus, describe_evaluation
from slipstream.rollout_queue.observe.changes import ChangeFinder
from slipstream.rollout_queue.observe.notices import CHANGED
from slipstream.rollout_queue.observe.workers import QUIET_S

# A status is written so often, seconds; events at once.
WRITE_S = 5.0

MAX_EVENTS = 2000

# Of the files: a week at a state each 5 seconds.
MAX_BYTES = 200 * 1024**2

# After a write that failed the next one is tried so much later, seconds.
RETRY_S = 60.0

# More workers than these are only counted in what is written.
_MAX_WORKERS = 64

_PART_BYTES = 4 * 1024**2

# Bytes of the files that are read again, at least in part, when a queue starts.
_READ_BYTES = 8 * 1024**2

_KILLED = "it was killed, hangs, or cannot reach the queue"

# A part that was thinned out so often is deleted when there is still no room.
_MAX_THINNED = 6


class Change(msgspec.Struct, frozen=True):
    """The rows and events that a status added to the history."""

    time: Row
    steps: list[Row]
    events: list[Event]


class History:
    """The history of one run.

    Args:
        folder: Where it is kept; None keeps it in memory alone.
        max_bytes: Of its files.

    Attributes:
        changes: Follows the steps and events.
        newest_at: Time of the newest entry that `load` read, wall clock, seconds; None if there was none.
        may_be_full: Whether `make_room` may have something to do.
        failure: Why nothing is written now, if that is so; the history in memory continues.
    """

    def __init__(self, folder: Path | None, max_bytes: int = MAX_BYTES) -> None:
        self.failure: str | None = None
        self.may_be_full = False
        self.columns = RunColumns()
        self.changes = ChangeFinder()
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._folder = folder
        self._max_bytes = max_bytes
        self.newest_at: float | None = None
        self._newest: Status | None = None
        self._unwritten: list[Row] = []
        self._written_at = float("-inf")
        self._file: _PartFile | None = None
        self._failed_at = float("-inf")

    def load(self) -> None:
        """Read what earlier queues of the run wrote. Blocks; call it before anything is added."""
        if self._folder is None:
            return
        order = history.Order()
        parts = history.parts(self._folder)
        size = sum(_size(part.path) for part in parts)
        for part in parts:
            for entry in map(order.moved, history.read_part(part.path, every=1 + size // _READ_BYTES)):
                if entry.status is not None:
                    self._newest = entry.status
                    steps = [row for row in entry.steps if row.get("step") and self.columns.add_step(row)]
                    _, newest = self.columns.add(entry.at, entry.status)
                    for step in [*steps, newest] if newest is not None else steps:
                        self.changes.step(step)
                if entry.event is not None:
                    self.events.append(entry.event)
                    self.changes.event(entry.event)
        self.newest_at = order.newest
        if self._newest is not None:  # of a queue that has ended, however soon
            self._newest = msgspec.structs.replace(self._newest, uptime_s=float("inf"))

    def add(self, status: Status, at: float, before: Sequence[Row] = (), is_last: bool = False) -> Change:
        """Add the status as of `at`, wall clock, seconds. The last one of a queue is written whenever it comes.

        Args:
            before: Rows of the steps since the status before, but for the newest one, which the status has.
        """
        events = between(self._newest, status, at)
        self._newest = status
        steps = [step for step in before if self.columns.add_step(step)]
        row, newest = self.columns.add(at, status)
        steps += [] if newest is None else [newest]
        for step in steps:
            events += [jump.event() for jump in self.changes.step(step)]
        for event in events:
            self.changes.event(event)
        self.events += events
        self._unwritten += steps
        self._write([Entry(at, event=event) for event in events])
        if is_last or at - self._written_at >= WRITE_S or at < self._written_at:
            self._written_at = at
            there = [worker for worker in status.workers if worker.does != "left"][:_MAX_WORKERS]
            self._write([Entry(at, msgspec.structs.replace(status, workers=there), steps=self._unwritten)])
            self._unwritten = []
        return Change(row, steps, events)

    def make_room(self) -> None:
        """Thin out or delete old parts until the rest fits. Blocks; `add` may be called meanwhile."""
        self.may_be_full = False
        with suppress(OSError):
            while self._folder is not None and self._size() > self._max_bytes:
                newest = self._file.part.number if self._file is not None else None
                parts = [part for part in history.parts(self._folder) if part.number != newest]
                if not parts:
                    return
                part = min(parts, key=lambda part: (part.thinned, part.number))
                if part.thinned < _MAX_THINNED:
                    _thin(part)
                else:
                    part.path.unlink()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()

    def _write(self, entries: Sequence[Entry]) -> None:
        if self._folder is None or not entries:
            return
        if self.failure is not None and 0 <= entries[0].at - self._failed_at < RETRY_S:
            return
        try:
            if self._file is not None and self._file.bytes >= _PART_BYTES:
                self._file.close()
                self._file, self.may_be_full = None, True
            if self._file is None:
                self._folder.mkdir(exist_ok=True)
                number = 1 + max((part.number for part in history.parts(self._folder)), default=0)
                self._file = _PartFile(Part.named(self._folder, number))
            self._file.write(entries)
            self.failure = None
        except OSError as error:
            why = error.strerror or error
            self.failure = f"the run's history, {self._folder}, has a gap until this is over: {why}; make room there"
            self._failed_at = entries[0].at
            self.close()

    def _size(self) -> int:
        assert self._folder is not None
        return sum(_size(part.path) for part in history.parts(self._folder))


class _PartFile:
    """A part that is being written. What was written can be read at once, and after a kill."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.bytes = 0
        self._file = part.path.open("xb", buffering=0)
        self._compressor = zlib.compressobj(6, zlib.DEFLATED, 31)

    def write(self, entries: Sequence[Entry]) -> None:
        lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
        self._put(self._compressor.compress(lines) + self._compressor.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        try:
            self._put(self._compressor.flush())
        finally:
            self._file.close()

    def _put(self, data: bytes) -> None:
        self.bytes += self._file.write(data) or 0


def _thin(part: Part) -> None:
    """Leave out every second status of a part. Of two files, the one that was not thinned out counts."""
    thinner = Part.named(part.path.parent, part.number, part.thinned + 1)
    unfinished = thinner.path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    file = _PartFile(msgspec.structs.replace(thinner, path=unfinished))
    statuses = 0
    for entry in history.read_part(part.path):
        statuses += entry.status is not None
        if entry.status is None or statuses % 2:
            file.write([entry])
    file.close()
    os.replace(unfinished, thinner.path)
    part.path.unlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_Said = tuple[EventKind, str, str | None]


def between(before: Status | None, after: Status, at: float) -> list[Event]:
    """Return what happened, in words.

    Args:
        before: The earlier status, perhaps of a queue that has ended since; None if there is none.
        at: Wall clock of the later one, seconds.
    """
    found = (*_run(before, after), *_servers(before, after), *_workers(before, after), *_told(before, after))
    return [Event(at, kind, text, who, after.step) for kind, text, who in found]


def _run(before: Status | None, after: Status) -> Iterator[_Said]:
    if before is None or _restarted(before, after):
        yield "run", "the queue started", None
    if after.learner.session and (before is None or after.learner.session != before.learner.session):
        yield "learner", f"the learner began session {after.learner.session} at step {after.step}", "learner"
        for setting in after.learner.changed:
            yield "change", f"{setting}, from step {after.step + 1} on", "learner"
    if before is None:
        return
    if after.step < before.step:
        yield "run", f"the run went back from step {before.step} to {after.step}", None
    if after.checkpoint_step is not None and after.checkpoint_step != before.checkpoint_step:
        yield "learner", f"a checkpoint of step {after.checkpoint_step} was saved", "learner"
    if after.stall.stalled and not before.stall.stalled:
        yield "run", f"no step for {after.stall.since_s:.0f} s: {after.stall.why or 'the cause is not known'}", None
    elif before.stall.stalled and not after.stall.stalled:
        yield "run", "steps are made again", None
    if after.gave_up and not before.gave_up:
        yield "run", f"the run was given up: {after.gave_up}", None
    if after.finished and not before.finished:
        yield "run", f"the run finished at step {after.step}", None


def _restarted(before: Status, after: Status) -> bool:
    return after.uptime_s < before.uptime_s


def _servers(before: Status | None, after: Status) -> Iterator[_Said]:
    were = {} if before is None else {server.name: server for server in before.servers}
    for server in after.servers:
        was = were.pop(server.name, None)
        if was is None:
            yield "server", f"server {server.name} at {server.url} joined, {_state(server)}", server.name
        elif was.state != server.state:
            yield "server", f"server {server.name} went from {was.state} to {_state(server)}", server.name
    for name in were:
        yield "server", f"server {name} left", name


def _state(server: ServerStatus) -> str:
    return f"{server.state}: {server.reason}" if server.reason else str(server.state)


def _workers(before: Status | None, after: Status) -> Iterator[_Said]:
    were = {} if before is None else {worker.worker_id: worker for worker in before.workers}
    failing: dict[str, list[str]] = {}
    for worker in after.workers:
        name, was = worker.worker_id, were.pop(worker.worker_id, None)
        gone = worker.is_gone
        if was is None and not gone:
            yield "worker", f"worker {name} joined{f' from {worker.host}' if worker.host else ''}", name
        elif worker.does == "refused" if was is None else _has_gone(was, worker):
            yield "worker", f"worker {name} {_how_gone(worker)}", name
        elif was is not None and not gone and (was.is_gone or _is_quiet(was)) and not _is_quiet(worker):
            yield "worker", f"worker {name} came back", name
        elif was is not None and not gone and 0 < was.pid != worker.pid > 0:
            yield "worker", f"worker {name} was started again: its process {was.pid} had ended without a word", name
        elif _is_quiet(worker) and not gone and (was is None or not _is_quiet(was)):
            yield "worker", f"worker {name} is not heard from for {worker.seen_s_ago:.0f} s: {_KILLED}", name
        for reason in set(worker.failures) - set(was.failures if was is not None else ()):
            failing.setdefault(reason, []).append(name)
    for reason, names in sorted(failing.items()):
        others = f" and {len(names) - 1:,} others" if len(names) > 1 else ""
        text = f"worker {names[0]}{others}: the first episodes that failed, for {reason}"
        yield "worker", text, names[0] if len(names) == 1 else None
    for worker in were.values():
        if not worker.is_gone:
            yield (
                "worker",
                f"worker {worker.worker_id} is no longer listed: it was not heard from for long",
                worker.worker_id,
            )


def _is_quiet(worker: WorkerStatus) -> bool:
    return worker.does not in ("left", "refused") and worker.seen_s_ago >= QUIET_S


def _has_gone(was: WorkerStatus, worker: WorkerStatus) -> bool:
    """Say whether it is news that a worker is gone. One that is silent for a minute was named when it fell quiet."""
    known = worker.does == "silent" and _is_quiet(was)
    return worker.is_gone and was.does != worker.does and not known


def _how_gone(worker: WorkerStatus) -> str:
    if worker.does == "refused":
        return f"was refused: {worker.reason}"
    return "left" if worker.does == "left" else f"is not heard from for a minute: {_KILLED}"


def _told(before: Status | None, after: Status) -> Iterator[_Said]:
    known = (
        0 if before is None or _restarted(before, after) else max((notice.id for notice in before.notices), default=0)
    )
    for notice in after.notices:
        # What the queue itself says of a server is the event of its state.
        if notice.id > known and not (notice.kind == reasons.SERVER and notice.who is None):
            yield "change" if notice.kind == CHANGED else "notice", notice.text, notice.who
    seen = set() if before is None else {cause.about for cause in before.diagnosis}
    for cause in after.diagnosis:
        if cause.about not in seen:
            yield "notice", cause.text, None
    ended = set() if before is None else {result.step for result in before.evaluations if result.ended}
    for result in after.evaluations:
        if result.ended and result.step not in ended:
            yield "evaluation", describe_evaluation(result), None
