"""Metrics of a step's rollouts for `metrics.jsonl`, under the names of TRL 1.16 where the meaning is the same.

Each metric is over the rollouts that have it, of every group that arrived, dropped ones too: otherwise rewards and
lengths would look better or worse than they are. Of a rollout only numbers are kept, as a step may drop any number of
groups before it is full. `choose` picks the rollouts that people get to read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from slipstream.protocol.messages import Group, Rollout, are_equal
from slipstream.protocol.rollouts import NEW_SEGMENTS, TIMINGS, TOOL_COUNT, WHY_FAILED

# The policy was cut off before it ended by itself: TRL's "clipped" completions.
CUT_OFF = ("length", "context")


class RolloutMetrics:
    """Collects a step's groups; `metrics` and `task_metrics` return their metrics.

    Attributes:
        prompt_tokens: Of all rollouts.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._own: defaultdict[str, list[float]] = defaultdict(list)
        self._sums: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        # By what is counted (calls, failures, seconds), sums of each tool.
        self._tools: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(int))

    @property
    def rewards(self) -> list[float]:
        """The reward of each rollout."""
        return self._values["reward"]

    def add(self, group: Group) -> None:
        """Add a group that arrived."""
        for numbers in group.by_role().values():
            if are_equal([group.rollouts[number].reward for number in numbers]):
                self._sums["flat"] += len(numbers)
        for rollout in group.rollouts:
            self._add(rollout)

    def include(self, other: RolloutMetrics) -> None:
        """Add all groups that another has collected."""
        self.prompt_tokens += other.prompt_tokens
        self._sums.update(other._sums)
        self._finished.update(other._finished)
        for ours, theirs in ((self._values, other._values), (self._own, other._own)):
            for name, values in theirs.items():
                ours[name] += values
        for what, sums in other._tools.items():
            for tool, value in sums.items():
                self._tools[what][tool] += value

    def _add(self, rollout: Rollout) -> None:
        self.prompt_tokens += _prompt_tokens(rollout)
        values, length = self._values, rollout.sampled_tokens
        values["reward"].append(rollout.reward)
        for name, value in rollout.reward_components.items():
            if value is not None:
                values[f"rewards/{name}"].append(value)
        values["length"].append(length)
        if rollout.finish_reason not in CUT_OFF:
            values["terminated_length"].append(length)
        values["turns"].append(rollout.turns)
        for name in TIMINGS:
            if name in rollout.timings:
                values[f"rollout/{name}_s"].append(rollout.timings[name])
        self._finished[rollout.finish_reason] += 1
        self._sums["calls"] += rollout.tool_calls
        self._sums["callers"] += rollout.tool_calls > 0
        self._sums["failures"] += rollout.tool_failures
        for name, value in rollout.metrics.items():
            if count := TOOL_COUNT.fullmatch(name):
                self._tools[count["what"]][count["tool"]] += value if count["what"] == "seconds" else int(value)
            elif name == NEW_SEGMENTS:
                self._sums["new_segments"] += int(value)
            else:
                self._own[name].append(value)

    def metrics(self) -> dict[str, float]:
        """Return the metrics; one without a measurement is left out.

        Lengths are in sampled tokens. `tools/call_frequency`: calls per rollout. `tools/caller_frequency`: share of
        rollouts that call. `tools/failure_frequency`: failures per call. `call_s`: mean seconds of a call. `_total` and
        `failures/<reason>`: sums. `chat/new_segments`: new segments per rollout, where there were any.
        `frac_reward_zero_std`: share of rollouts whose group has equal rewards. `finish/<reason>`: share of rollouts
        that ended so.
        """
        values, sums, rollouts = self._values, self._sums, len(self.rewards)
        calls_of, failures_of = self._tools["calls"], self._tools["failures"]
        found: dict[str, float | None] = {"frac_reward_zero_std": ratio(sums["flat"], rollouts)}
        for name in [name for name in values if name.startswith("rewards/")]:
            found |= {f"{name}/mean": mean_of(values[name]), f"{name}/std": deviation_of(values[name])}
        found["completions/clipped_ratio"] = ratio(rollouts - len(values["terminated_length"]), rollouts)
        for name in ("length", "terminated_length"):
            for kind, statistic in (("mean", mean_of), ("min", _least), ("max", _greatest)):
                found[f"completions/{kind}_{name}"] = statistic(values[name])
        found |= {"rollout/turns_mean": mean_of(values["turns"]), "rollout/turns_max": _greatest(values["turns"])}
        found |= {name: mean_of(values[name]) for name in values if name.startswith("rollout/")}
        found |= {
            NEW_SEGMENTS: ratio(sums["new_segments"], rollouts) if sums["new_segments"] else None,
            "tools/call_frequency": ratio(sums["calls"], rollouts),
            "tools/caller_frequency": ratio(sums["callers"], rollouts),
            "tools/failure_frequency": ratio(sums["failures"], sums["calls"]),
        }
        for tool, count in calls_of.items():
            found |= {
                f"tools/{tool}/call_frequency": ratio(count, rollouts),
                f"tools/{tool}/failure_frequency": ratio(failures_of[tool], count),
                f"tools/{tool}/call_total": count,
                f"tools/{tool}/failure_total": failures_of[tool],
            }
        found |= {f"tools/{tool}/call_s": ratio(time, calls_of[tool]) for tool, time in self._tools["seconds"].items()}
        found |= {f"tools/{tool}/coerced_total": count for tool, count in self._tools["coerced"].items()}
        for reason in (f"failures/{reason}" for reason in WHY_FAILED):
            found |= {f"tools/{tool}/{reason}": count for tool, count in self._tools[reason].items()}
        found |= {f"finish/{reason}": ratio(count, rollouts) for reason, count in self._finished.items()}
        return {name: value for name, value in found.items() if value is not None}

    def task_metrics(self) -> dict[str, float]:
        """Return means of the task's own metrics, under the names that it chose."""
        return {name: fmean(values) for name, values in self._own.items()}


def _prompt_tokens(rollout: Rollout) -> int:
    """Count the tokens before the first sampled one of every segment: the model reads the prompt of a later one
    too."""
    return sum(
        segment.version_spans[0].start if segment.version_spans else len(segment.token_ids)
        for segment in rollout.segments
    )


def ratio(part: float, whole: float) -> float | None:
    """Return `part / whole`; None where the whole is 0."""
    return part / whole if whole else None


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None where there are no values."""
    return fmean(values) if values else None


def deviation_of(values: Sequence[float]) -> float | None:
    """Return the sample's standard deviation; None of fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _least(values: Sequence[float]) -> float | None:
    return min(values, default=None)


def _greatest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


class RolloutPosition(NamedTuple):
    """Rollout number `rollout` of group number `group` of a step."""

    group: int
    rollout: int


def choose(rewards: Sequence[Sequence[float]], count: int, turn: int) -> list[RolloutPosition]:
    """Pick rollouts to read: the best, the worst, then one of each other group in turn, then any.

    Args:
        rewards: Those of each group, or of each role of one.
        count: How many to pick.
        turn: Varies which rollout of a group is picked from step to step.
    """
    longest = max((len(group) for group in rewards), default=0)
    places = [
        RolloutPosition(number, (nth + turn) % len(group))
        for nth in range(longest)
        for number, group in enumerate(rewards)
        if nth < len(group)
    ]
    by_reward = sorted(places, key=lambda place: -rewards[place.group][place.rollout])
    extremes = dict.fromkeys([*by_reward[:1], *by_reward[-1:]])
    shown = {place.group for place in extremes}
    others = sorted(places, key=lambda place: place.group in shown)
    return list(dict.fromkeys([*extremes, *others]))[:count]
