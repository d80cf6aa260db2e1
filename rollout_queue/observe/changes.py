"""Finds at which step a run changed: rewards, policy and tools by their figures, and what was changed just before.

A figure jumped where each of the first `_AFTER` steps lies beyond all of the `_BEFORE` before them, by several of their
standard deviations and by enough to matter. What drifts does not jump. Each step is looked at once, so the cost of a
step does not grow with the run.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import fmean, pstdev

import msgspec

from slipstream.protocol.config import RunConfig
from slipstream.protocol.history import Event, Row
from slipstream.rollout_queue.observe.notices import printable

# Steps after a jump that are looked at, and before it: at least, and at most.
_AFTER, _MIN_BEFORE, _BEFORE = 3, 4, 10

# Standard deviations of the steps before by which the mean has to move.
_DEVIATIONS = 4.0

# Parts of the mean before by which a reward or the time of a call has to move, and the share of calls that fail.
_REWARD, _CALL, _FAILURES = 0.2, 1.0, 0.1

# Times by which `kl` and the norm of the gradient have to rise, and the part to which `ess` has to fall. A KL below
# `_MIN_KL` nats moves nothing, whatever it was before.
_POLICY_TIMES, _ESS_PART, _MIN_KL = 4.0, 0.5, 0.05

# Calls that are shorter are not worth a word, seconds.
_MIN_CALL_S = 0.02

# A fall to less than this part of what the reward was keeps the run from learning.
_HALF = 0.5

# Steps between what was changed and a jump that follows from it, next to the staleness bound.
_SLACK = 3

# What explains a fall: how many, and characters of each.
_MAX_EXPLANATIONS, _MAX_EXPLANATION = 4, 130

_FIGURE = re.compile(
    r"(?P<reward>reward)|rewards/(?P<part>.+)/mean|tools/(?P<fails>.+)/failure_frequency|tools/(?P<takes>.+)/call_s"
    r"|(?P<policy>kl|ess|grad_norm)"
)


class Jump(msgspec.Struct, frozen=True):
    """A figure that is another from `step` on. `name`: as in `metrics.jsonl`; the means are of a few steps."""

    name: str
    step: int
    at: float
    before: float
    after: float

    @property
    def text(self) -> str:
        """The jump in words."""
        found = _FIGURE.fullmatch(self.name)
        assert found is not None
        before, after = f"{self.before:.3g}", f"{self.after:.3g}"
        if found["reward"]:
            text = f"the reward {self._moved} from {before} to {after}"
        elif part := found["part"]:
            text = f"the reward of {part} {self._moved} from {before} to {after}"
        elif tool := found["fails"]:
            text = f"{self.after:.0%} of the calls of tool {tool} fail, before {self.before:.0%}"
        elif found["policy"]:
            text = f"{self.name} went from {before} to {after}"
        else:
            text = f"a call of tool {found['takes']} takes {after} s, before {before} s"
        return printable(f"{text}, from step {self.step} on")

    @property
    def is_of_policy(self) -> bool:
        """Whether it is a figure of how far updates moved the policy."""
        found = _FIGURE.fullmatch(self.name)
        return found is not None and found["policy"] is not None

    @property
    def _moved(self) -> str:
        return "fell" if self.after < self.before else "rose"

    def event(self) -> Event:
        return Event(self.at, "change", self.text, step=self.step)


class ChangeFinder:
    """Follows the steps of a run, and the events next to them.

    Attributes:
        fall: The newest fall of the reward, until it has risen again by half of it; None if there is none.
    """

    def __init__(self) -> None:
        self.fall: Jump | None = None
        self._rows: deque[Row] = deque(maxlen=_BEFORE + _AFTER)
        # Of each figure the step of its newest jump: what lies before is no measure of what comes.
        self._jumped: dict[str, float] = {}
        self._jumps: deque[Jump] = deque(maxlen=64)
        self._events: deque[Event] = deque(maxlen=64)

    def step(self, row: Row) -> list[Jump]:
        """Take the next step. Returns the figures that are seen now to have jumped, a few steps ago."""
        number = row["step"] or 0.0
        if self._rows and (self._rows[-1]["step"] or 0.0) >= number:  # a resumed run makes a step again
            self._forget_from(number)
        self._rows.append(row)
        found = [jump for name in _figures(row) if (jump := self._jump(name)) is not None]
        self._jumps += found
        for jump in found:
            self._jumped[jump.name] = jump.step
            if jump.name == "reward":
                self.fall = jump if jump.after < jump.before else None
        if self.fall is not None and number > self.fall.step:
            newest = fmean(_values(list(self._rows)[-_AFTER:], "reward") or [self.fall.after])
            if newest > (self.fall.before + self.fall.after) / 2:
                self.fall = None
        return found

    def event(self, event: Event) -> None:
        """Take an event; one that may explain a fall is kept."""
        if event.step is not None and event.kind in ("change", "learner", "server"):
            self._events.append(event)

    def describe_fall(self, config: RunConfig, rollouts: str) -> str:
        """Describe the fall and what to look at. `rollouts`: the command that shows rollouts. Raises ValueError if
        there is no fall."""
        if self.fall is None:
            raise ValueError("the reward did not fall")
        if found := self.explanations(config.queue.max_staleness):
            told = "; ".join(text[:_MAX_EXPLANATION] for text in found[:_MAX_EXPLANATIONS])
            moved = {jump.text for jump in self._jumps if jump.is_of_policy}
            remedy = "Look at that before the task"
            if moved.issuperset(found):
                remedy = f"Steps are too large: lower learner.learning_rate = {config.learner.learning_rate:g}"
            return f"{self.fall.text}. What changed there: {told}. {remedy}"
        return (
            f"{self.fall.text}. Nothing that the queue knows of was changed there. Read what the policy says since "
            f"with `{rollouts} --step {self.fall.step}`: a service, a file or a model that tools and rewards use may "
            f"be another; or steps are too large: lower learner.learning_rate = {config.learner.learning_rate:g}"
        )

    def explanations(self, max_staleness: int) -> list[str]:
        """Return what was changed when the reward fell, in words: what people changed, what broke, and what moved the
        policy, then what follows from it."""
        if self.fall is None:
            return []
        first, last = self.fall.step - max_staleness - _SLACK, self.fall.step + max_staleness + _SLACK
        events = [event for event in self._events if event.step is not None and first <= event.step < self.fall.step]
        jumps = [jump for jump in self._jumps if jump.name != "reward" and first <= jump.step <= last]
        told = {jump.text for jump in jumps}
        changed = [event.text for event in events if event.kind == "change" and event.text not in told]
        began = [event.text for event in events if event.kind == "learner" and "began session" in event.text]
        broke = [
            event.text
            for event in events
            if event.kind == "server" and ("to quarantined" in event.text or "to down" in event.text)
        ]
        moved = [jump.text for jump in jumps if jump.is_of_policy]
        causes = [jump.text for jump in jumps if not jump.is_of_policy and not jump.name.startswith("rewards/")]
        fell = {jump.name: jump.text for jump in jumps if jump.name.startswith("rewards/") and jump.after < jump.before}
        return list(dict.fromkeys([*changed, *began, *broke, *moved, *causes, *fell.values()]))

    @property
    def lost_half(self) -> bool:
        """Whether the reward fell by more than half of what it was."""
        return self.fall is not None and self.fall.before - self.fall.after > _HALF * abs(self.fall.before)

    def _forget_from(self, number: float) -> None:
        while self._rows and (self._rows[-1]["step"] or 0.0) >= number:
            self._rows.pop()
        self._jumped = {name: step for name, step in self._jumped.items() if step < number}
        self._jumps = deque((jump for jump in self._jumps if jump.step < number), self._jumps.maxlen)
        if self.fall is not None and self.fall.step >= number:
            self.fall = None

    def _jump(self, name: str) -> Jump | None:
        """Say whether a figure jumped `_AFTER` steps ago."""
        rows, since = list(self._rows), self._jumped.get(name, 0.0)
        before, after = rows[:-_AFTER], rows[-_AFTER:]
        old = _values([row for row in before if (row["step"] or 0.0) >= since], name)
        new = _values(after, name)
        if len(old) < _MIN_BEFORE or len(new) < _AFTER:
            return None
        was, now = fmean(old), fmean(new)
        if not (max(new) < min(old) or min(new) > max(old)) or abs(now - was) < _DEVIATIONS * pstdev(old):
            return None
        if not _matters(name, was, now):
            return None
        return Jump(name, int(after[0]["step"] or 0), after[0].get("at") or 0.0, was, now)


def _figures(row: Row) -> list[str]:
    """Return the names of the figures to follow. Of a single reward function the reward says as much."""
    names = [name for name in row if _FIGURE.fullmatch(name)]
    parts = [name for name in names if name.startswith("rewards/")]
    return names if len(parts) > 1 else [name for name in names if name not in parts]


def _matters(name: str, was: float, now: float) -> bool:
    moved = abs(now - was)
    if name.endswith("/failure_frequency"):
        return moved >= _FAILURES
    if name.endswith("/call_s"):
        return moved >= _CALL * min(was, now) and moved >= _MIN_CALL_S
    if name == "ess":
        return now <= _ESS_PART * was
    if name in ("kl", "grad_norm"):
        return now >= _POLICY_TIMES * was and (name == "grad_norm" or now >= _MIN_KL)
    return moved >= _REWARD * max(abs(was), abs(now)) > 0


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return list(_known(rows, name))


def _known(rows: Iterable[Row], name: str) -> Iterator[float]:
    for row in rows:
        if (value := row.get(name)) is not None:
            yield value
