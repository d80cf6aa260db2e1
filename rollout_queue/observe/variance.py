"""Groups whose rewards are all equal: none of them has a gradient, and a run of nothing else makes no step.

It judges the groups that the learner has ended, by the rewards that they came with.
"""

from __future__ import annotations

import shlex
from collections import deque
from pathlib import Path
from statistics import fmean

import msgspec

WINDOW = 400
_SHARE = 0.9
_LEAST_IN_A_ROW = 16
_STEPS_IN_A_ROW = 4


class Rewards(msgspec.Struct, frozen=True):
    """Of one group: the mean, and whether all are equal."""

    mean: float
    equal: bool

    @classmethod
    def of(cls, rewards: list[float]) -> Rewards:
        return cls(fmean(rewards), min(rewards) == max(rewards))


class Variance:
    """`groups_per_step`: B of the run; `run_file`: from the working directory of whoever reads the notice."""

    def __init__(self, groups_per_step: int, run_file: Path = Path("run.toml")) -> None:
        self._rollouts = f"slipstream rollouts {shlex.quote(str(run_file))}"
        self._in_a_row_at_most = max(_LEAST_IN_A_ROW, _STEPS_IN_A_ROW * groups_per_step)
        self._in_a_row = 0
        self._newest: deque[bool] = deque(maxlen=WINDOW)
        self._means: deque[float] = deque(maxlen=WINDOW)

    def ended(self, equal: bool, rewards: Rewards | None) -> None:
        """A group was trained, or dropped for its rewards. `rewards`: None where they are not known."""
        self._newest.append(equal)
        self._in_a_row = self._in_a_row + 1 if equal else 0
        if equal and rewards is not None:
            self._means.append(rewards.mean)

    def notice(self) -> str | None:
        """What to tell of it, None while enough groups have variance."""
        if self._in_a_row >= self._in_a_row_at_most:
            return f"{self._in_a_row} groups in a row had rewards that are all equal {self.remedy()}"
        if len(self._newest) == WINDOW and sum(self._newest) > _SHARE * WINDOW:
            return f"{sum(self._newest)} of the last {WINDOW} groups had rewards that are all equal {self.remedy()}"
        return None

    def remedy(self) -> str:
        """The mean reward of the groups without variance, what it points to, and what to change."""
        if not self._means:
            return f"and give no gradient: look at the rewards with `{self._rollouts} --worst`"
        lowest, highest = min(self._means), max(self._means)
        if lowest != highest:
            found = "groups differ, the episodes of one group do not: are they sampled at all? See rollout.temperature"
        elif lowest == 0:
            found = "all are 0: the task may be too hard, or the reward wrong"
        else:
            found = f"all are {lowest:g}: the task may be too easy, or the reward wrong"
        return (
            f"(mean reward {fmean(self._means):.3g}) and give no gradient: {found}. Read what the policy says with "
            f"`{self._rollouts}`; mend the reward or the rows, raise rollout.temperature or "
            f'rollout.group_size, or train them all the same with learner.zero_variance = "keep"'
        )
