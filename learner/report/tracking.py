"""Each step's figures to the trackers of `tracking.report_to`, under the names that they have in `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.tracking import GeneralTracker

from learner.report.evaluations import EARLIER
from learner.report.trackers import rollout_table
from learner.report.trackers.background import Background
from learner.report.trackers.installed import wanted
from learner.report.trackers.start import REPLACES_STEPS, Memory, Start, id_of, new_ids, renamed, start_of, started
from protocol.config import RunConfig
from protocol.rollouts import RolloutView

# What a tracker may have at the run's end, to send what waits.
CLOSE_S = 60.0

# Sections that say how a run learns; tokens and addresses are in others.
_TOLD = ("run", "model", "rollout", "queue", "learner", "eval")

_UNTOLD = ("token", "host", "port")


class Tracking:
    """One session's trackers. newest: the newest step that the run's journal has, given-up ones included; `warn` tells
    a person. Without trackers it does nothing."""

    def __init__(self, config: RunConfig, step: int, newest: int, warn: Callable[[str], None]) -> None:
        names = wanted(config.tracking)
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
            rollout_table.send(tracker, samples, step)

    return job
