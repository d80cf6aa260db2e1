"""One night: a fleet, a schedule, and what became of both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.nights import audit
from tests.nights.examples import BY_NAME, Example
from tests.nights.fleet import Fleet
from tests.nights.injuries import Injuries, NotThere
from tests.nights.schedule import Strike

STARTS_WITHIN_S = 300.0
# After a fault is undone, a step is made within so many seconds, restarts of the whole run included.
STEPS_WITHIN_S = {True: 60.0, False: 150.0}
QUIET_WITHIN_S = 120.0
# Processes that wait for a core, for each core, from which on a run is given more time: others use the machine too.
BUSY = 4.0
STEPS_AT_THE_END = 5
# A disk above this size is a file, a smaller one is in memory.
IN_MEMORY_BYTES = 1 << 30
# A run that makes steps makes one within so many seconds, or within so many times what its steps take.
STEP_WITHIN_S = 20.0
STEP_WITHIN_TIMES = 4
# A run that is started again needs so many times what its first start took: others use the machine too.
START_WITHIN_TIMES = 2


@dataclass
class Told:
    """What became of one strike.

    Attributes:
        line: The first line that named it; None: there was none.
        after_s: Seconds until that line.
        step_after_s: Seconds from its end until a step was made; None: none was, in time.
        skipped: Why it was not done; None: it was.
    """

    strike: Strike
    target: str
    line: str | None = None
    after_s: float | None = None
    step_after_s: float | None = None
    skipped: str | None = None

    @property
    def broken(self) -> list[str]:
        if self.skipped is not None:
            return []
        found = []
        if self.strike.of.says and self.line is None:
            found.append(f"{self.strike.fault} of {self.target} was not told")
        if self.step_after_s is None:
            found.append(f"no step after {self.strike.fault} of {self.target}")
        return found


@dataclass
class Outcome:
    """What a night found. `broken`: the rules that it broke; empty if all is well."""

    seed: int
    seconds: float
    steps: int
    starts: int
    strikes: list[Told]
    broken: list[str] = field(default_factory=list)
    labels: audit.Labels = field(default_factory=audit.Labels)
    growth: dict[str, dict[str, int]] = field(default_factory=dict)
    trends: dict[str, dict[str, audit.Trend]] = field(default_factory=dict)
    log_bytes: dict[str, int] = field(default_factory=dict)
    reward: tuple[float, float] = (0.0, 0.0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Night:
    """Plays a schedule.

    Args:
        every_s: Least seconds between two strikes.
    """

    def __init__(self, fleet: Fleet, every_s: float) -> None:
        self._fleet = fleet
        self._injuries = Injuries(fleet)
        self._every_s = every_s
        self._growth = audit.Growth(fleet.example.grows_bytes)
        self._busy: set[str] = set()
        self._start_s = 0.0
        self._over = threading.Event()

    def play(self, schedule: Sequence[Strike], say: Any = lambda text: None, quiet_s: float = 0.0) -> Outcome:
        """Start the run, hurt it, let it end, and audit it.

        Args:
            quiet_s: Seconds for which it is left alone after the last strike.
        """
        fleet, began = self._fleet, time.monotonic()
        told: list[Told] = []
        broken: list[str] = []
        keeping = threading.Thread(target=self._keep, daemon=True)
        fleet.start()
        keeping.start()
        try:
            begun = self._wait(lambda: fleet.watch.step() >= 2 and self._whole(), STARTS_WITHIN_S * slowness())
            self._start_s = time.monotonic() - began
            self._growth.warm_after_s = max(self._growth.warm_after_s, START_WITHIN_TIMES * self._start_s)
            if not begun:
                broken.append(f"the run did not begin: {'; '.join(map(str, fleet.watch.lines[-3:]))}")
                schedule, quiet_s = [], 0.0
            threads = []
            first = time.monotonic()
            for strike in schedule:
                self._until_free(strike, first + strike.at_s)
                of = Told(strike, self._injuries.target(strike))
                told.append(of)
                threads.append(threading.Thread(target=self._strike, args=(of, say), daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join(300)
            time.sleep(quiet_s)
            quiet_within_s = self._restarts_within(QUIET_WITHIN_S)
            if begun and not self._wait(self._whole, quiet_within_s):
                broken.append(f"not whole again after {quiet_within_s:.0f} s: {'; '.join(self._ailing())}")
            self._over.set()
            keeping.join()
            steps = fleet.watch.step() + STEPS_AT_THE_END
            if begun and (code := fleet.finish(steps)) != 0:
                broken.append(f"the run ended with code {code}, at step {fleet.watch.step()} of {steps}")
        finally:
            self._over.set()
            keeping.join()
            if left := fleet.close():
                broken += [f"left running: {line}" for line in left]
        found = Outcome(fleet.seed, time.monotonic() - began, fleet.watch.step(), fleet.starts, told, broken)
        if begun:
            self._audit(found, steps)
        return found

    def _audit(self, found: Outcome, steps: int) -> None:
        fleet = self._fleet
        for of in found.strikes:
            found.broken += of.broken
        found.broken += [*audit.of_files(fleet.run_dir, steps), *self._growth.broken()]
        found.growth, found.trends = self._growth.table(), self._growth.trends()
        found.labels = audit.labels(fleet.run_dir, fleet.kept, fleet.model, fleet.seed)
        if found.labels.worst > fleet.example.worst_off:
            found.broken.append(f"a label is {found.labels.worst:.2g} nats off")
        if found.labels.mean > fleet.example.mean_off:
            found.broken.append(f"labels are {found.labels.mean:.2g} nats off in the mean")
        found.log_bytes = {file.name: file.stat().st_size for file in (fleet.run_dir / "logs").glob("*.log")}
        found.reward = audit.rewards(fleet.run_dir)

    def _keep(self) -> None:
        looked = 0.0
        while not self._over.wait(1.0):
            self._fleet.keep()
            if time.monotonic() - looked > 10:
                looked = time.monotonic()
                self._growth.look(self._fleet.with_engines())

    def _until_free(self, strike: Strike, at: float) -> None:
        """Wait for a strike's time, and until what it hurts is whole: two faults in one have one line."""
        alone = strike.of.target in ("queue", "learner") or strike.fault == "full disk"
        target = self._injuries.target(strike)

        def free() -> bool:
            taken = bool(self._busy) if alone else target in self._busy or "alone" in self._busy
            return time.monotonic() >= at and not taken and self._up() and self._serves(target)

        self._wait(free, STARTS_WITHIN_S)
        self._busy |= {target, "alone"} if alone else {target}

    def _strike(self, of: Told, say: Any) -> None:
        strike, watch = of.strike, self._fleet.watch
        alone = strike.of.target in ("queue", "learner") or strike.fault == "full disk"
        began, lasts_s = time.monotonic(), self._lasts_s(strike)
        try:
            with self._injuries.done(strike):
                time.sleep(lasts_s)
            ended = time.monotonic()
            pattern = strike.of.says.format(target=of.target)
            within_s = strike.of.within_s * (1 if self._fleet.fake else 2) * slowness() + lasts_s
            if pattern:
                self._wait(lambda: watch.first(pattern, began) is not None, began + within_s - time.monotonic())
                if (line := watch.first(pattern, began)) is not None:
                    of.line, of.after_s = str(line)[:300], round(line.at - began, 1)
            steps_within_s = self._restarts_within(STEPS_WITHIN_S[self._fleet.fake])
            self._wait(lambda: watch.steps[-1][0] > ended, steps_within_s)
            made = [at for at, _ in watch.steps if at > ended]
            of.step_after_s = round(made[0] - ended, 1) if made else None
        except NotThere as error:
            of.skipped = f"{error} is not there"
        finally:
            self._busy -= {of.target, "alone"} if alone else {of.target}
        named = of.skipped or (f"{of.after_s} s: {of.line}" if of.line else "not told" if strike.of.says else "borne")
        say(f"{began - self._started():7.1f} {strike.fault} ({of.target}): {named}; step after {of.step_after_s} s")

    def _started(self) -> float:
        return self._fleet.watch.steps[0][0] if self._fleet.watch.steps else time.monotonic()

    def _up(self) -> bool:
        """Whether the run makes steps: it may be hurt."""
        watch, fleet = self._fleet.watch, self._fleet
        status = watch.status
        if fleet.up is None or fleet.up.poll() is not None or status is None:
            return False
        serving = any(server["state"] == "serving" for server in status["servers"])
        within_s = max(STEP_WITHIN_S, STEP_WITHIN_TIMES * watch.step_s())
        return serving and bool(watch.steps) and time.monotonic() - watch.steps[-1][0] < within_s

    def _lasts_s(self, strike: Strike) -> float:
        """Seconds until a strike is undone. A full disk is noticed by what is written: at the latest, a checkpoint."""
        if strike.fault != "full disk":
            return strike.lasts_s
        return max(strike.lasts_s, (self._fleet.example.checkpoint_every + 1) * self._fleet.watch.step_s())

    def _restarts_within(self, least_s: float) -> float:
        """Seconds within which the run is whole again and makes a step, by what its start and its steps took."""
        measured_s = START_WITHIN_TIMES * self._start_s + STEP_WITHIN_TIMES * self._fleet.watch.step_s()
        return max(least_s * slowness(), measured_s)

    def _serves(self, target: str) -> bool:
        """Whether a server serves: what is not up cannot be missed. True for what is no server."""
        status = self._fleet.watch.status or {"servers": []}
        states = {of["name"]: of["state"] for of in status["servers"]}
        return target not in self._fleet.server_urls or states.get(target) == "serving"

    def _whole(self) -> bool:
        return self._up() and not self._ailing()

    def _ailing(self) -> list[str]:
        status = self._fleet.watch.status
        if status is None:
            return ["the queue does not answer"]
        found = [
            f"{of['name']} is {of['state']} ({of['reason']})" for of in status["servers"] if of["state"] != "serving"
        ]
        known = {of["name"] for of in status["servers"]}
        return found + [f"{name} is not registered" for name in self._fleet.server_urls if name not in known]

    def _wait(self, reached: Any, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if reached():
                return True
            time.sleep(0.1)
        return bool(reached())


def play(
    schedule: Sequence[Strike],
    seed: int,
    fake: bool,
    every_s: float,
    example: Example = BY_NAME["multiply"],
    say: Any = print,
    keep: Path | None = None,
    quiet_s: float = 0.0,
) -> Outcome:
    """Play a schedule with a new fleet, in a folder that is deleted if nothing was broken.

    Args:
        quiet_s: Seconds for which it is left alone after the last strike.
        keep: Where the run's directory and all that was heard are copied to, for `slipstream report`.
    """
    folder = Path(tempfile.mkdtemp(prefix="night-"))
    with ExitStack() as stack:
        if schedule and has_disk_of_its_own(folder / "runs", example.disk_bytes):
            stack.callback(subprocess.run, ["umount", "-l", str(folder / "runs")], check=False)
        fleet = Fleet(folder, folder / "model" if fake else example.model, fake, seed, example)
        try:
            outcome = Night(fleet, every_s).play(schedule, say, quiet_s)
        finally:
            (folder / "heard.txt").write_text("\n".join(f"{line.at:.1f} {line}" for line in fleet.watch.lines))
            if keep is not None:
                big = shutil.ignore_patterns("checkpoints", "queue-groups")
                shutil.copytree(fleet.run_dir, keep, ignore=big, dirs_exist_ok=True)
                shutil.copy(folder / "heard.txt", keep)
        if outcome.broken:
            shutil.copytree(folder / "runs", folder / "kept-runs", ignore=shutil.ignore_patterns("filler"))
            print(f"broken; what is left is in {folder}", file=sys.stderr)
    if not outcome.broken:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def slowness() -> float:
    """How many times slower than a quiet machine this one may be now."""
    return max(1.0, os.getloadavg()[0] / (BUSY * (os.cpu_count() or 1)))


def has_disk_of_its_own(folder: Path, size: int) -> bool:
    """Mount a small disk there, so that it can be filled; False where that is not allowed."""
    folder.mkdir(parents=True)
    if os.getuid() != 0:
        return False
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "night", str(folder)]
    if size > IN_MEMORY_BYTES:
        image = folder.parent / "disk"
        with image.open("wb") as file:
            file.truncate(size)
        if subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True).returncode != 0:
            return False
        mount = ["mount", "-o", "loop", str(image), str(folder)]
    return subprocess.run(mount, capture_output=True).returncode == 0
