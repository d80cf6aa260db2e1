"""Sends each step's metrics to the trackers of `tracking.report_to`, under the names that `metrics.jsonl` uses.

Each tracker has its own thread: whatever it does, or fails to do, neither blocks nor ends the run. A resumed run
continues at the same place, by what `trackers.json` in the run directory keeps.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.learner.report.records import EARLIER
from slipstream.learner.report.trackers import TRACKERS, Start, wanted_trackers
from slipstream.protocol.config import RunConfig
from slipstream.protocol.rollouts import RolloutView
from slipstream.protocol.status import EVAL, EVAL_STEP

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

FILE_NAME = "trackers.json"

# Steps that wait for a tracker that does not answer. Further ones are lost, and counted.
MAX_WAITING = 1000

# Seconds that a tracker may take at the end of the run to send what still waits.
CLOSE_S = 60.0

# Sections that say how a run learns; tokens and addresses are in others.
_SENT_SECTIONS = ("run", "model", "rollout", "queue", "learner", "eval")

_PRIVATE_SETTINGS = ("token", "host", "port")

Job = Callable[["GeneralTracker"], None]


class Memory(msgspec.Struct):
    """A run's memory of its trackers, in `trackers.json`.

    Attributes:
        ids: The run's id by tracker.
        seen: The newest step that any session of the run has made.
        known: Trackers that any session of the run had.
    """

    ids: dict[str, str] = {}
    seen: int = 0
    known: list[str] = []

    @classmethod
    def of(cls, run_dir: Path) -> Memory:
        """Read the file; empty where there is none, or none that can be read."""
        try:
            return msgspec.json.decode((run_dir / FILE_NAME).read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return cls()

    def keep(self, run_dir: Path) -> None:
        """Write the file. Raises `OSError`."""
        aside = run_dir / f".unfinished-{FILE_NAME}"
        aside.write_bytes(msgspec.json.encode(self) + b"\n")
        os.replace(aside, run_dir / FILE_NAME)

    def with_trackers(self, names: Sequence[str]) -> Memory:
        """Add these trackers, with a new id for each that wants one from us and has none."""
        made = {name: id for name in names if (id := TRACKERS[name].new_id()) is not None}
        return Memory({**made, **self.ids}, self.seen, list(dict.fromkeys([*self.known, *names])))


def start_of(config: RunConfig, tracker: str, step: int, memory: Memory) -> Start:
    """Return the arguments of `tracker` for a session that resumes from `step`, or begins at 0."""
    section = config.tracking
    return Start(
        folder=config.run_dir.absolute(),
        runs=config.run.dir.absolute(),
        project=section.project,
        name=section.run_name or config.run.name,
        step=step,
        id=memory.ids.get(tracker),
        options=section.options.get(tracker, {}),
    )


class Tracking:
    """Sends one session's metrics to its trackers; without trackers it does nothing.

    Args:
        step: Step of the checkpoint that the session resumes from; 0 where the run starts.
        newest: The newest step in the run's journal, given-up ones included.
        warn: Shows a line to a person. It may be called from any thread.
    """

    def __init__(self, config: RunConfig, step: int, newest: int, warn: Callable[[str], None]) -> None:
        names = wanted_trackers(config.tracking)
        self._config = config
        self._warn = warn
        self._lock = threading.Lock()
        self._memory = Memory()
        self._trackers: list[Background] = []
        self._sent: dict[str, int] = {}
        if not names:
            return
        # A run that begins again is another run to the trackers, whatever a folder of this name held before.
        found = Memory.of(config.run_dir) if step else Memory()
        seen = max(found.seen, newest) if step else 0
        self._memory = Memory(found.ids, seen, found.known).with_trackers(names)
        self._sent = {name: seen for name in found.known if not TRACKERS[name].replaces_steps}
        self._keep()
        settings = sent_settings(config)
        for name in names:
            start = start_of(config, name, step, self._memory)
            tracker = Background(name, self._starter(name, start), warn)
            self._trackers.append(tracker)
            if name not in found.known:
                tracker.put(lambda made: made.store_init_configuration(dict(settings)))

    @property
    def names(self) -> list[str]:
        return [tracker.name for tracker in self._trackers]

    def step(self, step: int, line: Mapping[str, Any], samples: Sequence[RolloutView]) -> None:
        """Send a line of `metrics.jsonl`, and some of the step's rollouts.

        Evaluations that have ended stand in the line too. Each is sent by itself, at its own step.
        """
        every = self._config.tracking.rollouts_every
        shown = samples if every and step % every == 0 else ()
        found = numbers(line)
        metrics = {name: value for name, value in found.items() if name != "step" and not name.startswith(EVAL)}
        for earlier in line.get(EARLIER, ()):
            self.evaluation(earlier)
        if EVAL_STEP in found:
            self.evaluation({name: value for name, value in found.items() if name.startswith(EVAL)})
        for tracker in self._trackers:
            if step > self._sent.get(tracker.name, 0):
                tracker.put(_sends(tracker.name, metrics, shown, step))

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Send an evaluation at the step that it evaluates: two that end by the same step are then two points."""
        sent = numbers(metrics)
        for tracker in self._trackers:
            tracker.put(_sends(tracker.name, sent, (), int(sent[EVAL_STEP])))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send waiting jobs, for at most `timeout_s` seconds a tracker."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close(timeout_s)

    def _starter(self, name: str, start: Start) -> Callable[[], GeneralTracker]:
        def make() -> GeneralTracker:
            made = TRACKERS[name].start(start)
            if (chosen := TRACKERS[name].run_id(made)) is not None:
                with self._lock:
                    self._memory.ids[name] = chosen
                    self._keep()
            return made

        return make

    def _keep(self) -> None:
        try:
            self._config.run_dir.mkdir(parents=True, exist_ok=True)
            self._memory.keep(self._config.run_dir)
        except OSError as error:
            self._warn(f"the trackers' ids cannot be kept, so a resumed run will be a new run there: {error}")


class Background:
    """Runs one tracker in a daemon thread, so a process that ends does not wait for a tracker that hangs.

    Args:
        name: The tracker's name.
        start: Makes the tracker; called in the thread.
        warn: Shows a line to a person; called from any thread, once until the end.
        most: Maximum number of jobs that wait.

    Attributes:
        lost: Jobs that failed, or for which there was no room.
    """

    def __init__(
        self, name: str, start: Callable[[], GeneralTracker], warn: Callable[[str], None], most: int = MAX_WAITING
    ) -> None:
        self.name = name
        self.lost = 0
        self._start = start
        self._warn = warn
        self._warned = False
        self._jobs: Queue[Job | None] = Queue(most)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; drop and count it where the queue is full."""
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._lose(f"it has not answered while {self._jobs.maxsize} lines came")

    def close(self, timeout_s: float) -> None:
        """Let the waiting jobs run for at most `timeout_s` seconds, and end the thread."""
        ends = time.monotonic() + timeout_s
        with suppress(Full):
            self._jobs.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, ends - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._jobs.qsize()
            self._warn(
                f"tracker {self.name} did not end within {timeout_s:g} s; it may lack {waiting} of the run's lines"
            )
        elif self.lost:
            self._warn(f"tracker {self.name} lacks {self.lost} of the run's lines; metrics.jsonl has them all")

    def _run(self) -> None:
        tracker = self._make()
        while (job := self._jobs.get()) is not None:
            if tracker is None:
                self.lost += 1
                continue
            try:
                job(tracker)
            except (Exception, SystemExit) as error:
                self._lose(_first_line(error))
        if tracker is not None:
            try:
                tracker.finish()
            except (Exception, SystemExit) as error:
                self._warn_once(_first_line(error))

    def _make(self) -> GeneralTracker | None:
        try:
            return self._start()
        except (Exception, SystemExit) as error:  # libraries raise many types; some call sys.exit
            self._warn_once(_first_line(error))
            return None

    def _lose(self, why: str) -> None:
        self.lost += 1
        self._warn_once(why)

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"tracker {self.name}: {why}; the run continues, and metrics.jsonl has every step")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Pick the finite numbers of a line; counts by reason become `groups_dropped/overage`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
        found |= {key: part for key, part in parts.items() if isinstance(part, int | float) and math.isfinite(part)}
    return found


def sent_settings(config: RunConfig) -> dict[str, Any]:
    """Pick the settings that say how a run learns, as trackers take them.

    Returns:
        Numbers, texts and booleans by `section.name`; no token and no address.
    """
    sent: dict[str, Any] = {}
    for section, values in config.model_dump(mode="json", include={*_SENT_SECTIONS}).items():
        for name, value in values.items():
            if name not in _PRIVATE_SETTINGS and value is not None:
                sent[f"{section}.{name}"] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return sent


def _sends(name: str, metrics: Mapping[str, float], samples: Sequence[RolloutView], step: int) -> Job:
    """Make a job that sends a step's metrics, and some of its rollouts, to the tracker `name`."""

    def job(made: GeneralTracker) -> None:
        tracker = TRACKERS[name]
        tracker.log(made, tracker.rename(metrics), step)
        if samples:
            tracker.log_rollouts(made, samples, step)

    return job
