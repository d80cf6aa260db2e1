"""What `metrics.jsonl` says of a step's rollouts, under the names of TRL 1.16 where the meaning is the same.

Each figure is over the rollouts that have it, of every group that arrived: dropped ones too, else rewards and lengths
would look better or worse than they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Self

import msgspec
import numpy as np

from protocol.messages import Group, Rollout

# The policy was cut off, and did not end by itself: TRL's "clipped" completions.
CUT_OFF = ("length", "context")

# A worker's counts of one tool, among the figures that a rollout carries; the other figures are the task's own.
TOOL_COUNT = re.compile(r"tools/(?P<tool>.+)/(?P<what>calls|failures)")


@dataclass(frozen=True)
class Outcome:
    """A rollout without its tokens and messages.

    tokens: that the policy sampled, over all segments; prompt_tokens: before the first of them.
    """

    rollout: Rollout
    tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        first = rollout.segments[0].loss_mask if rollout.segments else np.zeros(0, dtype=np.bool_)
        return cls(
            rollout=msgspec.structs.replace(rollout, segments=[], messages=None),
            tokens=rollout.sampled_tokens,
            prompt_tokens=int(first.argmax()) if first.any() else len(first),
        )


def outcomes_of(group: Group) -> list[Outcome]:
    return [Outcome.of(rollout) for rollout in group.rollouts]


def rollout_metrics(groups: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """One line a metric; one that nothing was measured for is left out.

    Lengths are in sampled tokens. `tools/call_frequency`: calls a rollout; `tools/failure_frequency`: failures a call;
    `_total`: their sums. `frac_reward_zero_std`: share of rollouts whose group has equal rewards; `finish/<reason>`:
    share of rollouts that ended so.
    """
    outcomes = [outcome for group in groups for outcome in group]
    rollouts = [outcome.rollout for outcome in outcomes]
    lengths = [outcome.tokens for outcome in outcomes]
    whole = [outcome.tokens for outcome in outcomes if outcome.rollout.finish_reason not in CUT_OFF]
    turns = [rollout.turns for rollout in rollouts]
    calls = sum(rollout.tool_calls for rollout in rollouts)
    failures = sum(rollout.tool_failures for rollout in rollouts)
    flat = sum(len(group) for group in groups if len({outcome.rollout.reward for outcome in group}) == 1)
    components = _by_name(rollout.reward_components for rollout in rollouts)
    finished = _by_name({rollout.finish_reason: 1.0} for rollout in rollouts)
    calls_of, failures_of = _tool_counts(rollouts, "calls"), _tool_counts(rollouts, "failures")
    metrics = {
        "frac_reward_zero_std": _ratio(flat, len(rollouts)),
        **{f"rewards/{name}/mean": fmean(values) for name, values in components.items()},
        **{f"rewards/{name}/std": stdev(values) for name, values in components.items() if len(values) > 1},
        "completions/mean_length": _over(fmean, lengths),
        "completions/min_length": _over(min, lengths),
        "completions/max_length": _over(max, lengths),
        "completions/clipped_ratio": _ratio(len(lengths) - len(whole), len(lengths)),
        "completions/mean_terminated_length": _over(fmean, whole),
        "completions/min_terminated_length": _over(min, whole),
        "completions/max_terminated_length": _over(max, whole),
        "rollout/turns_mean": _over(fmean, turns),
        "rollout/turns_max": _over(max, turns),
        "tools/call_frequency": _ratio(calls, len(rollouts)),
        "tools/failure_frequency": _ratio(failures, calls),
        **{f"tools/{tool}/call_frequency": _ratio(count, len(rollouts)) for tool, count in calls_of.items()},
        **{f"tools/{tool}/failure_frequency": _ratio(failures_of[tool], count) for tool, count in calls_of.items()},
        **{f"tools/{tool}/call_total": count for tool, count in calls_of.items()},
        **{f"tools/{tool}/failure_total": failures_of[tool] for tool in calls_of},
        **{f"finish/{reason}": _ratio(len(ended), len(rollouts)) for reason, ended in finished.items()},
    }
    return {name: value for name, value in metrics.items() if value is not None}


def task_metrics(groups: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """The task's own figures: means, under the names that it chose."""
    figures = _by_name(outcome.rollout.metrics for group in groups for outcome in group)
    return {name: fmean(values) for name, values in figures.items() if not TOOL_COUNT.fullmatch(name)}


def _tool_counts(rollouts: Iterable[Rollout], what: str) -> Counter[str]:
    """Calls or failures by tool."""
    counts: Counter[str] = Counter()
    for name, values in _by_name(rollout.metrics for rollout in rollouts).items():
        count = TOOL_COUNT.fullmatch(name)
        if count and count["what"] == what:
            counts[count["tool"]] += int(sum(values))
    return counts


def _by_name(figures: Iterable[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """The values that are there, by name."""
    values: dict[str, list[float]] = {}
    for of_one in figures:
        for name, value in of_one.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return values


def _over(reduce: Callable[[list[int]], float], values: list[int]) -> float | None:
    return reduce(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
