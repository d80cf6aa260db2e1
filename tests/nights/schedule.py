"""Draws what is done to a run and when, from a seed; and shrinks a schedule that breaks a rule to what it needs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.nights.faults import BY_NAME, Fault


@dataclass(frozen=True)
class Strike:
    """One fault of a schedule.

    Attributes:
        at_s: Seconds since the run's first step.
        which: Chooses among several targets, modulo their number.
        lasts_s: Seconds until it is undone.
    """

    at_s: float
    fault: str
    which: int = 0
    lasts_s: float = 0.0

    @property
    def of(self) -> Fault:
        return BY_NAME[self.fault]


def draw(seed: int, seconds: float, every_s: float, faults: Sequence[Fault]) -> list[Strike]:
    """Draw a schedule. Each fault comes once before any comes twice, so that a short night is a wide one; one that was
    too near its last is left out."""
    rng = random.Random(seed)
    weighted = [fault for fault in faults for _ in range(fault.weight)]
    strikes: list[Strike] = []
    left: list[Fault] = []
    came: dict[str, float] = {}
    at_s = rng.uniform(0, every_s)
    while at_s < seconds:
        if not left:
            first = rng.sample(list(faults), len(faults))
            left = first if not strikes else rng.sample(weighted, len(weighted))
        fault = left.pop()
        if at_s - came.get(fault.name, -fault.apart_s) < fault.apart_s:
            if not left:  # of a few faults none may be due
                at_s += every_s
            continue
        came[fault.name] = at_s
        strikes.append(Strike(round(at_s, 1), fault.name, rng.randrange(16), round(rng.uniform(*fault.lasts_s), 1)))
        at_s += every_s * rng.uniform(0.5, 1.5)
    return strikes


def shrink(schedule: Sequence[Strike], fails: Callable[[list[Strike]], bool], tries: int = 64) -> list[Strike]:
    """Find a part of a failing schedule that still fails and of which no strike can be left out (delta debugging).

    Args:
        schedule: One that fails.
        fails: Runs a schedule, with the times of the whole; says whether it still fails.
        tries: Greatest number of schedules to run.
    """
    left, parts = list(schedule), 2
    while len(left) > 1 and tries > 0:
        size = -(-len(left) // parts)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            tries -= 1
            if fails(rest):
                left, parts = rest, max(parts - 1, 2)
                break
            if tries == 0:
                break
        else:
            if parts >= len(left):
                break
            parts = min(len(left), 2 * parts)
    return left


def closer(schedule: Sequence[Strike], every_s: float) -> list[Strike]:
    """Bring the strikes of a shrunken schedule together, so that repeating it takes no longer than it needs."""
    return [Strike(round(place * every_s, 1), of.fault, of.which, of.lasts_s) for place, of in enumerate(schedule)]


def save(schedule: Sequence[Strike], file: Path) -> None:
    file.write_text("\n".join(json.dumps(asdict(strike)) for strike in schedule) + "\n", encoding="utf-8")


def load(file: Path) -> list[Strike]:
    return [Strike(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
