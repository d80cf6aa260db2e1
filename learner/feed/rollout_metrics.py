"""Metrics of a step's rollouts for `metrics.jsonl`, under the names of TRL 1.16 where the meaning is the same.

Each metric is over the rollouts that have it, of every group that arrived, dropped ones too: otherwise rewards and
lengths would look better or worse than they are. No rollout is kept, as a step may drop any number of groups before it
is full. `choose` picks the rollouts that people get to read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.protocol.messages import Group, Rollout, are_equal
from slipstream.protocol.rollouts import NEW_SEGMENTS, TIMINGS, TOOL_COUNT, WHY_FAILED
from slipstream.protocol.running import Running

# The policy was cut off before it ended by itself: TRL's "clipped" completions.
CUT_OFF = ("length", "context")


class RolloutMetrics:
    """Collects a step's groups; `metrics` and `task_metrics` return their metrics."""

    def __init__(self) -> None:
        self.rewards = Running()
        self.prompt_tokens = 0
        self._flat = 0
        self._components: defaultdict[str, Running] = defaultdict(Running)
        self._lengths = Running()
        self._whole = Running()
        self._turns = Running()
        self._calls = 0
        self._callers = 0
        self._failures = 0
        self._new_segments = 0
        self._tools: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._tool_s: defaultdict[str, float] = defaultdict(float)
        self._finished: Counter[str] = Counter()
        self._seconds: defaultdict[str, Running] = defaultdict(Running)
        self._own: defaultdict[str, Running] = defaultdict(Running)

    def add(self, group: Group) -> None:
        """Add a group that arrived."""
        for numbers in group.by_role().values():
            if are_equal([group.rollouts[number].reward for number in numbers]):
                self._flat += len(numbers)
        for rollout in group.rollouts:
            self._add(rollout)

    def include(self, other: RolloutMetrics) -> None:
        """Add all groups that another has collected."""
        for ours, theirs in (
            (self.rewards, other.rewards),
            (self._lengths, other._lengths),
            (self._whole, other._whole),
            (self._turns, other._turns),
        ):
            ours.include(theirs)
        for named, of_other in (
            (self._components, other._components),
            (self._seconds, other._seconds),
            (self._own, other._own),
        ):
            for name, values in of_other.items():
                named[name].include(values)
        for what, counts in other._tools.items():
            self._tools[what].update(counts)
        for tool, seconds in other._tool_s.items():
            self._tool_s[tool] += seconds
        self._finished.update(other._finished)
        self.prompt_tokens += other.prompt_tokens
        self._flat += other._flat
        self._calls += other._calls
        self._callers += other._callers
        self._failures += other._failures
        self._new_segments += other._new_segments

    def _add(self, rollout: Rollout) -> None:
        self.rewards.add(rollout.reward)
        self.prompt_tokens += _prompt_tokens(rollout)
        for name, value in rollout.reward_components.items():
            if value is not None:
                self._components[name].add(value)
        length = rollout.sampled_tokens
        self._lengths.add(length)
        if rollout.finish_reason not in CUT_OFF:
            self._whole.add(length)
        self._finished[rollout.finish_reason] += 1
        self._turns.add(rollout.turns)
        for name in TIMINGS:
            if name in rollout.timings:
                self._seconds[name].add(rollout.timings[name])
        self._calls += rollout.tool_calls
        self._callers += rollout.tool_calls > 0
        self._failures += rollout.tool_failures
        for name, value in rollout.metrics.items():
            count = TOOL_COUNT.fullmatch(name)
            if count and count["what"] == "seconds":
                self._tool_s[count["tool"]] += value
            elif count:
                self._tools[count["what"]][count["tool"]] += int(value)
            elif name == NEW_SEGMENTS:
                self._new_segments += int(value)
            else:
                self._own[name].add(value)

    def metrics(self) -> dict[str, float]:
        """Return the metrics; one without a measurement is left out.

        Lengths are in sampled tokens. `tools/call_frequency`: calls per rollout. `tools/caller_frequency`: share of
        rollouts that call. `tools/failure_frequency`: failures per call. `call_s`: mean seconds of a call. `_total` and
        `failures/<reason>`: sums. `chat/new_segments`: new segments per rollout, where there were any.
        `frac_reward_zero_std`: share of rollouts whose group has equal rewards. `finish/<reason>`: share of rollouts
        that ended so.
        """
        rollouts, calls_of, failures_of = self.rewards.count, self._tools["calls"], self._tools["failures"]
        metrics = {
            "frac_reward_zero_std": ratio(self._flat, rollouts),
            **{f"rewards/{name}/mean": values.mean for name, values in self._components.items()},
            **{f"rewards/{name}/std": values.std for name, values in self._components.items()},
            "completions/mean_length": self._lengths.mean,
            "completions/min_length": self._lengths.min,
            "completions/max_length": self._lengths.max,
            "completions/clipped_ratio": ratio(rollouts - self._whole.count, rollouts),
            "completions/mean_terminated_length": self._whole.mean,
            "completions/min_terminated_length": self._whole.min,
            "completions/max_terminated_length": self._whole.max,
            "rollout/turns_mean": self._turns.mean,
            "rollout/turns_max": self._turns.max,
            **{f"rollout/{name}_s": values.mean for name, values in self._seconds.items()},
            NEW_SEGMENTS: ratio(self._new_segments, rollouts) if self._new_segments else None,
            "tools/call_frequency": ratio(self._calls, rollouts),
            "tools/caller_frequency": ratio(self._callers, rollouts),
            "tools/failure_frequency": ratio(self._failures, self._calls),
            **{f"tools/{tool}/call_frequency": ratio(count, rollouts) for tool, count in calls_of.items()},
            **{f"tools/{tool}/failure_frequency": ratio(failures_of[tool], count) for tool, count in calls_of.items()},
            **{f"tools/{tool}/call_s": ratio(seconds, calls_of[tool]) for tool, seconds in self._tool_s.items()},
            **{f"tools/{tool}/call_total": count for tool, count in calls_of.items()},
            **{f"tools/{tool}/failure_total": failures_of[tool] for tool in calls_of},
            **{f"tools/{tool}/coerced_total": count for tool, count in self._tools["coerced"].items()},
            **{
                f"tools/{tool}/failures/{reason}": count
                for reason in WHY_FAILED
                for tool, count in self._tools[f"failures/{reason}"].items()
            },
            **{f"finish/{reason}": ratio(count, rollouts) for reason, count in self._finished.items()},
        }
        return {name: value for name, value in metrics.items() if value is not None}

    def task_metrics(self) -> dict[str, float]:
        """Return means of the task's own metrics, under the names that it chose."""
        return {name: values.mean for name, values in self._own.items() if values.mean is not None}


def _prompt_tokens(rollout: Rollout) -> int:
    """Count the tokens before the first sampled one of every segment: the model reads the prompt of a later one
    too."""
    return sum(
        segment.version_spans[0].start if segment.version_spans else len(segment.token_ids)
        for segment in rollout.segments
    )


def ratio(part: float, whole: float) -> float | None:
    """Return a share; None of nothing."""
    return part / whole if whole else None


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
