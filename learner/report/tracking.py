"""Each step's figures to the trackers of `tracking.report_to`, under the names that they have in `metrics.jsonl`.

accelerate's trackers: which are installed, how each is started and continued, and a thread for each.

One tracker in a thread of its own: what it does, or fails to do, never holds or ends the run.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Full, Queue
from typing import Any

from accelerate.tracking import GeneralTracker

from learner.report import trackers
from learner.report.records import EARLIER
from learner.report.trackers import (
    REPLACES_STEPS,
    Memory,
    Start,
    id_of,
    new_ids,
    renamed,
    start_of,
    started,
    wanted_trackers,
)
from protocol.config import RunConfig
from protocol.rollouts import RolloutView

# Steps that wait for a tracker that does not answer. What comes when there are so many is lost, and counted.
MAX_WAITING = 1000

Job = Callable[[GeneralTracker], None]


class Background:
    """`start` makes the tracker, in the thread; `warn` tells a person, from whatever thread, and once.

    The thread is a daemon: a process that ends does not wait for a tracker that hangs.
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
        """Have it done; where too much waits already, it is lost."""
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._lose(f"it has not answered while {self._jobs.maxsize} lines came")

    def close(self, timeout_s: float) -> None:
        """Let it do what waits, at most so long, and end."""
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
        tracker = self._started()
        while (job := self._jobs.get()) is not None:
            if tracker is None:
                self.lost += 1
                continue
            try:
                job(tracker)
            except (Exception, SystemExit) as error:
                self._lose(_said(error))
        if tracker is not None:
            try:
                tracker.finish()
            except (Exception, SystemExit) as error:
                self._say(_said(error))

    def _started(self) -> GeneralTracker | None:
        try:
            return self._start()
        except (Exception, SystemExit) as error:  # of many types; some libraries leave by sys.exit
            self._say(_said(error))
            return None

    def _lose(self, why: str) -> None:
        self.lost += 1
        self._say(why)

    def _say(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"tracker {self.name}: {why}; the run goes on, and metrics.jsonl has every step")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# What a tracker may have at the run's end, to send what waits.
CLOSE_S = 60.0

# Sections that say how a run learns; tokens and addresses are in others.
_TOLD = ("run", "model", "rollout", "queue", "learner", "eval")

_UNTOLD = ("token", "host", "port")


class Tracking:
    """One session's trackers. newest: the newest step that the run's journal has, given-up ones included; `warn` tells
    a person. Without trackers it does nothing."""

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
        # The run's first session names it anew: what a folder of this name was before is another run.
        found = Memory.of(config.run_dir) if step else Memory()
        seen = max(found.seen, newest) if step else 0
        self._memory = new_ids(Memory(found.ids, seen, found.known), names)
        self._sent = {name: seen for name in found.known if name not in REPLACES_STEPS}
        self._keep()
        settings = told_settings(config)
        for name in names:
            start = start_of(config, name, step, self._memory)
            tracker = Background(name, self._starter(name, start), warn)
            self._trackers.append(tracker)
            if name not in found.known:
                tracker.put(lambda made: made.store_init_configuration(dict(settings)))

    def step(self, step: int, line: Mapping[str, Any], samples: Sequence[RolloutView]) -> None:
        """A line of `metrics.jsonl`, and some of the step's rollouts."""
        every = self._config.tracking.rollouts_every
        shown = samples if every and step % every == 0 else ()
        figures = {name: value for name, value in numbers(line).items() if name != "step"}  # that is the axis
        for tracker in self._trackers:
            if step > self._sent.get(tracker.name, 0):
                for earlier in line.get(EARLIER, ()):  # first: of what has one step, some trackers keep the last
                    tracker.put(_sends(numbers(earlier), (), step))
                tracker.put(_sends(figures, shown, step))

    def late(self, step: int, figures: Mapping[str, Any]) -> None:
        """Figures that came after the line of their step."""
        for tracker in self._trackers:
            tracker.put(_sends(numbers(figures), (), step))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits, for at most `timeout_s` seconds a tracker."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close(timeout_s)

    @property
    def names(self) -> list[str]:
        return [tracker.name for tracker in self._trackers]

    def _starter(self, name: str, start: Start) -> Callable[[], GeneralTracker]:
        def make() -> GeneralTracker:
            made = started(name, start)
            if (chosen := id_of(name, made)) is not None:
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
            self._warn(f"the trackers' ids cannot be kept, so that a resumed run will be a new one there: {error}")


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line that are finite; counts by reason stand as `groups_dropped/overage`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
        found |= {key: part for key, part in parts.items() if isinstance(part, int | float) and math.isfinite(part)}
    return found


def told_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that say how a run learns, as trackers take them: numbers, texts and booleans by `section.name`."""
    told: dict[str, Any] = {}
    for section, values in config.model_dump(mode="json", include={*_TOLD}).items():
        for name, value in values.items():
            if name not in _UNTOLD and value is not None:
                told[f"{section}.{name}"] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return told


def _sends(figures: Mapping[str, float], samples: Sequence[RolloutView], step: int) -> Callable[[GeneralTracker], None]:
    def job(tracker: GeneralTracker) -> None:
        tracker.log(renamed(tracker.name, figures), step=step)
        if samples:
            trackers.send_rollout_table(tracker, samples, step)

    return job
