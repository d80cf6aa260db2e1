"""Metrics of rollouts, and what TRL 1.16 makes of the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.learner.feed.rollout_metrics import RolloutMetrics
from slipstream.protocol.messages import Rollout
from tests.kit.messages import group, segment


def outcome(tokens: int = 3, prompt: int = 2, reward: float = 0.0, finish: str = "stop", **fields: Any) -> Rollout:
    """A rollout of one segment: given tokens, then sampled ones."""
    pattern = [*[None] * prompt, *[0] * tokens]
    return Rollout([segment(pattern)], reward, finish, **fields)  # type: ignore[arg-type]


def counted(*groups: list[Rollout]) -> RolloutMetrics:
    found = RolloutMetrics()
    for rollouts in groups:
        found.add(group(rollouts=rollouts))
    return found


def metrics(*rollouts: Rollout) -> dict[str, float]:
    return counted(list(rollouts)).metrics()


def test_tools_failure_frequency_is_failures_over_calls() -> None:
    """TRL's: 2 of 3 calls failed, whichever rollouts made them; a rollout without calls changes nothing."""
    found = metrics(outcome(tool_calls=2, tool_failures=2), outcome(tool_calls=1), outcome(), outcome())
    assert found["tools/failure_frequency"] == pytest.approx(0.667, abs=1e-3)
    assert (found["tools/call_frequency"], found["tools/caller_frequency"]) == (3 / 4, 2 / 4)


def test_without_a_call_there_is_no_failure_frequency() -> None:
    found = metrics(outcome(), outcome())
    assert found["tools/call_frequency"] == 0
    assert "tools/failure_frequency" not in found


def test_each_tool_is_counted_apart() -> None:
    found = metrics(
        outcome(metrics={"tools/add/calls": 2.0, "tools/add/failures": 1.0}),
        outcome(metrics={"tools/add/calls": 1.0, "tools/search/web/calls": 1.0, "tools/search/web/failures": 1.0}),
        outcome(),
    )
    assert {name: value for name, value in found.items() if name.startswith(("tools/add", "tools/search"))} == {
        "tools/add/call_frequency": 1.0,
        "tools/add/failure_frequency": pytest.approx(1 / 3),
        "tools/add/call_total": 3,
        "tools/add/failure_total": 1,
        "tools/search/web/call_frequency": pytest.approx(1 / 3),
        "tools/search/web/failure_frequency": 1.0,
        "tools/search/web/call_total": 1,
        "tools/search/web/failure_total": 1,
    }


def test_failures_of_a_tool_are_counted_by_reason_and_arguments_that_were_coerced() -> None:
    found = metrics(
        outcome(metrics={"tools/a/calls": 3.0, "tools/a/failures": 2.0, "tools/a/failures/timeout": 2.0}),
        outcome(metrics={"tools/a/calls": 1.0, "tools/a/failures": 1.0, "tools/a/failures/raised": 1.0}),
        outcome(metrics={"tools/a/b/calls": 2.0, "tools/a/b/failures/timeout": 1.0, "tools/a/b/coerced": 2.0}),
        outcome(metrics={"tools/a/calls": 1.0, "tools/a/coerced": 1.0}),
    )
    assert {name: value for name, value in found.items() if "/failures/" in name or "coerced" in name} == {
        "tools/a/failures/timeout": 2,
        "tools/a/failures/raised": 1,
        "tools/a/b/failures/timeout": 1,
        "tools/a/b/coerced_total": 2,
        "tools/a/coerced_total": 1,
    }
    assert (found["tools/a/call_total"], found["tools/a/failure_total"]) == (5, 3)


def test_a_reward_s_part_is_over_the_rollouts_that_have_it() -> None:
    found = metrics(
        outcome(reward_components={"exact": 1.0, "style": None}),
        outcome(reward_components={"exact": 0.0, "style": 0.5}),
        outcome(reward_components={"exact": 0.0}),
    )
    assert found["rewards/exact/mean"] == pytest.approx(1 / 3)
    assert found["rewards/exact/std"] == pytest.approx(np.std([1, 0, 0], ddof=1))
    assert found["rewards/style/mean"] == 0.5
    assert "rewards/style/std" not in found, "one value has no deviation"


def test_lengths_count_sampled_tokens_over_all_segments() -> None:
    rewritten = Rollout([segment([None, 0, 0, None, 0]), segment([None, None, 0])], 0.0, "stop")
    found = metrics(outcome(tokens=8), rewritten)
    assert (found["completions/mean_length"], found["completions/min_length"]) == (6, 4)
    assert found["completions/max_length"] == 8


def test_what_was_cut_off_is_clipped_and_does_not_count_as_terminated() -> None:
    found = metrics(
        outcome(tokens=10, finish="length"),
        outcome(tokens=20, finish="context"),
        outcome(4),
        outcome(2, finish="timeout"),
    )
    assert found["completions/clipped_ratio"] == 0.5
    assert (found["completions/mean_length"], found["completions/mean_terminated_length"]) == (9, 3)
    assert (found["completions/min_terminated_length"], found["completions/max_terminated_length"]) == (2, 4)
    assert found["finish/context"] == found["finish/timeout"] == 0.25
    assert "completions/mean_terminated_length" not in metrics(outcome(finish="length"))


def test_the_share_of_rollouts_without_variance() -> None:
    flat, varied = [outcome(reward=1.0)] * 2, [outcome(reward=reward) for reward in (0.0, 1.0, 1.0)]
    assert counted(flat, varied).metrics()["frac_reward_zero_std"] == 2 / 5


def test_turns() -> None:
    found = metrics(outcome(turns=1), outcome(turns=4))
    assert (found["rollout/turns_mean"], found["rollout/turns_max"]) == (2.5, 4)


def test_the_task_s_own_figures_are_over_the_rollouts_that_have_them() -> None:
    rollouts = [outcome(metrics={"hops": 4.0, "tools/add/calls": 1.0}), outcome(), outcome(metrics={"hops": 2.0})]
    assert counted(rollouts).task_metrics() == {"hops": 3.0}


def test_the_prompt_ends_where_the_first_token_was_sampled() -> None:
    found = counted([outcome(tokens=3, prompt=2), outcome(tokens=0, prompt=5), Rollout([], 0.0, "aborted")])
    assert found.prompt_tokens == 7


def test_every_segment_s_prompt_is_read_and_counts() -> None:
    rewritten = Rollout([segment([None, 0, 0, None, 0]), segment([None, None, 0])], 0.0, "stop")
    assert counted([rewritten]).prompt_tokens == 3


def test_new_segments_are_counted_over_all_rollouts_and_are_not_the_task_s_figure() -> None:
    found = counted([outcome(metrics={"chat/new_segments": 2.0}), outcome(), outcome(), outcome()])
    assert found.metrics()["chat/new_segments"] == 0.5
    assert found.task_metrics() == {}
    assert "chat/new_segments" not in metrics(outcome())


def test_deviations_are_the_sample_s_however_far_from_zero_and_over_however_many_groups() -> None:
    random = np.random.default_rng(0)
    rewards = 1e8 + random.normal(size=60)
    groups = [[outcome(reward_components={"far": value}) for value in part] for part in np.split(rewards, 12)]
    found = counted(*groups).metrics()
    assert found["rewards/far/mean"] == pytest.approx(rewards.mean(), rel=1e-12)
    assert found["rewards/far/std"] == pytest.approx(rewards.std(ddof=1), rel=1e-6)


def test_a_step_without_a_rollout_has_no_metrics() -> None:
    assert counted().metrics() == counted().task_metrics() == {}


def test_metrics_that_include_others_are_those_of_all_groups() -> None:
    """Whichever of the two is empty, and however they are split."""
    tools = {"tools/add/calls": 2.0, "tools/add/failures": 1.0, "depth": 3.0}
    groups = [
        [outcome(3, reward=0.5, tool_calls=2, tool_failures=1, metrics=tools, turns=2), outcome(5, reward=1.0)],
        [outcome(1, reward=2.0, finish="length", reward_components={"a": 1.0, "b": None}), outcome(9, reward=2.0)],
        [outcome(4, prompt=7, reward=-3.0, metrics={"depth": 9.0}), outcome(2, reward=0.1)],
    ]
    whole = counted(*groups)
    for cut in range(len(groups) + 1):
        parts = counted(*groups[:cut])
        parts.include(counted(*groups[cut:]))
        assert parts.metrics() == pytest.approx(whole.metrics())
        assert parts.task_metrics() == pytest.approx(whole.task_metrics())
        ours, theirs = parts.rewards, whole.rewards
        assert (ours.count, ours.min, ours.max, parts.prompt_tokens) == (
            theirs.count,
            theirs.min,
            theirs.max,
            whole.prompt_tokens,
        )
        assert (ours.mean, ours.std) == pytest.approx((theirs.mean, theirs.std))
