"""Notices: texts that tell a person what to fix, each once; and the one about groups whose rewards are all equal.

Such groups give no gradient, and a run of nothing else makes no step.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, deque
from pathlib import Path
from statistics import fmean

import msgspec

from protocol.status import Notice

MAX_NOTICES = 64

MAX_CHARACTERS = 500

_MAX_KNOWN = 1024

# Workers repeat their notices with each heartbeat.
_MAX_REPEATED = 65_536

# A shorter name may be a part of a word.
_MIN_NAME_CHARACTERS = 4

_NUMBERS = re.compile(r"\d+")


class _Said(msgspec.Struct):
    id: int
    kind: str
    text: str
    who: str | None
    at: float
    others: set[str]


class Notices:
    """Keeps the newest `MAX_NOTICES`. Texts that differ only in digits, or in the name of who they are about, are the
    same notice, unless they come with a key."""

    def __init__(self) -> None:
        self._said: deque[_Said] = deque(maxlen=MAX_NOTICES)
        self._known: dict[tuple[str, str], _Said] = {}
        self._repeated: dict[int, None] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Notices ever given."""
        return self._count

    def say(self, kind: str, text: str, now: float, who: str | None = None, key: str | None = None) -> None:
        """Add a notice unless it was given before.

        Args:
            kind: A reason of `protocol.reasons`.
            text: What is wrong and what to do; cut at MAX_CHARACTERS.
            now: Current time, seconds.
            who: The worker or process that it is about.
            key: Notices of one kind and key are the same, whatever their texts.
        """
        given = hash((kind, text, who, key))
        if given in self._repeated:
            return
        self._repeated[given] = None
        if len(self._repeated) > _MAX_REPEATED:
            del self._repeated[next(iter(self._repeated))]
        # Terminals print it, and it may quote sampled text: no escape sequences.
        kind = kind[:MAX_CHARACTERS]
        text = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:MAX_CHARACTERS])
        who = who and "".join(c if c.isprintable() else " " for c in who)
        nameless = text.replace(who, "") if who and len(who) >= _MIN_NAME_CHARACTERS else text
        name = (kind, _NUMBERS.sub("0", nameless) if key is None else key)
        if (known := self._known.get(name)) is not None:
            if who and who != known.who:
                known.others.add(who)
            return
        self._count += 1
        said = self._known[name] = _Said(self._count, kind, text, who, now, set())
        self._said.append(said)
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def list(self, now: float) -> list[Notice]:
        """Oldest first."""
        return [
            Notice(said.id, said.kind, said.text, said.who, now - said.at, 1 + len(said.others)) for said in self._said
        ]


WINDOW_GROUPS = 400

_MAX_EQUAL_SHARE = 0.9

# Share of the groups without variance that have the same reward, from which on it is taken for that of all.
_USUAL_SHARE = 0.9

_MIN_IN_A_ROW = 16

_STEPS_IN_A_ROW = 4


class Rewards(msgspec.Struct, frozen=True):
    """The rewards of one group: their mean, and whether all are equal."""

    mean: float
    equal: bool

    @classmethod
    def of(cls, rewards: list[float]) -> Rewards:
        return cls(fmean(rewards), min(rewards) == max(rewards))


class Variance:
    """Watches for groups whose rewards are all equal, among those that the learner has ended.

    Args:
        groups_per_step: Groups per optimiser step.
        run_file: Named in the commands that the notice recommends; relative to the reader's working directory.
    """

    def __init__(self, groups_per_step: int, run_file: Path = Path("run.toml")) -> None:
        self._rollouts = f"slipstream rollouts {shlex.quote(str(run_file))}"
        self._max_in_a_row = max(_MIN_IN_A_ROW, _STEPS_IN_A_ROW * groups_per_step)
        self._in_a_row = 0
        self._newest: deque[bool] = deque(maxlen=WINDOW_GROUPS)
        self._means: deque[float] = deque(maxlen=WINDOW_GROUPS)

    def ended(self, equal: bool, rewards: Rewards | None) -> None:
        """Count a group that was trained, or dropped for its rewards.

        Args:
            equal: Whether its rewards are all equal.
            rewards: None if they are not known, as after a restart of the queue.
        """
        self._newest.append(equal)
        self._in_a_row = self._in_a_row + 1 if equal else 0
        if equal and rewards is not None:
            self._means.append(rewards.mean)

    def notice(self) -> str | None:
        """Return the notice; None while enough groups have variance."""
        if self._in_a_row >= self._max_in_a_row:
            return f"{self._in_a_row} groups in a row had rewards that are all equal {self.remedy()}"
        if len(self._newest) == WINDOW_GROUPS and sum(self._newest) > _MAX_EQUAL_SHARE * WINDOW_GROUPS:
            return (
                f"{sum(self._newest)} of the last {WINDOW_GROUPS} groups had rewards that are all equal {self.remedy()}"
            )
        return None

    def remedy(self) -> str:
        """Say what the mean reward of the groups without variance points to, and what to change."""
        if not self._means:
            return f"and give no gradient: look at the rewards with `{self._rollouts} --worst`"
        # One group that succeeded or failed by chance does not make them differ.
        usual, count = Counter(self._means).most_common(1)[0]
        are = "all are" if count == len(self._means) else "nearly all are"
        if count < _USUAL_SHARE * len(self._means):
            found = "groups differ, the episodes of one group do not: are they sampled at all? See rollout.temperature"
        elif usual == 0:
            found = f"{are} 0: the task may be too hard, or the reward wrong"
        else:
            found = f"{are} {usual:g}: the task may be too easy, or the reward wrong"
        return (
            f"(mean reward {fmean(self._means):.3g}) and give no gradient: {found}. Read what the policy says with "
            f"`{self._rollouts}`; fix the reward or the rows, raise rollout.temperature or "
            f'rollout.group_size, or train them all the same with learner.zero_variance = "keep"'
        )
