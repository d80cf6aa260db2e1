from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm import advantages
from slipstream.learner.feed.step_draft import Batch, Draft, LeasedGroup
from slipstream.learner.feed.token_batch import TokenBatch
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.messages import FinishReason, Group, TeacherTop, TurnEnd
from tests.kit import LEARNER, config, group, segment
from tests.kit.messages import group_of_roles, group_of_turns

VERSIONS = st.lists(st.none() | st.integers(0, 6), min_size=2, max_size=10)


def _draft(version: int = 0, **learner: Any) -> Draft:
    return Draft(config(LEARNER, learner=learner, queue={"max_staleness": 2}), 1, version, "1-1")


def _masking(version: int = 0, **learner: Any) -> Draft:
    settings = {"learner": learner, "queue": {"max_staleness": 2}, "rollout": {"mask_truncated": True}}
    return Draft(config(LEARNER, settings), 1, version, "1-1")


def test_refill_wants_groups_until_enough_stand() -> None:
    draft = _draft(groups_per_step=2)
    assert draft.wanted == 2
    assert draft.add([LeasedGroup(group("flat", [1, 1]), 0), LeasedGroup(group("a", [0, 1]), 0)]) == {
        "flat": "zero_variance"
    }
    assert draft.wanted == 1
    assert draft.add([LeasedGroup(group("b", [0, 1]), 0)]) == {}
    assert draft.wanted == 0
    assert draft.finish().ticket_ids == ["a", "b"]


def test_drop_consumes_exactly_groups_per_step() -> None:
    draft = _draft(groups_per_step=2, zero_variance="drop")
    draft.add([LeasedGroup(group("flat", [1, 1]), 0)])
    assert draft.wanted == 1
    draft.add([LeasedGroup(group("a", [0, 1]), 0)])
    assert draft.wanted == 0
    assert draft.finish().ticket_ids == ["a"]


def test_drop_takes_further_groups_when_nothing_is_trainable() -> None:
    draft = _draft(groups_per_step=2, zero_variance="drop")
    draft.add([LeasedGroup(group("f1", [1, 1]), 0), LeasedGroup(group("f2", [0, 0]), 0)])
    assert draft.wanted == 2


def advantages_of(batch: Batch, advantage: str = "grpo", **settings: Any) -> np.ndarray:
    return advantages.build(LearnerSection(advantage=advantage, **settings))(batch.rollouts)


def test_keep_trains_groups_without_variance_at_advantage_zero() -> None:
    draft = _draft(groups_per_step=1, zero_variance="keep")
    assert draft.add([LeasedGroup(group("flat", [1, 1]), 0)]) == {}
    batch = draft.finish()
    assert batch.counts.tokens_trained == 2 * 3
    assert not advantages_of(batch).any()


def scored(ticket: str, columns: dict[str, list[float | None]], weights: dict[str, float]) -> Group:
    """A group whose rewards are the weighted sums of components."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    sums = [sum(weights.get(name, 1.0) * (value or 0.0) for name, value in row.items()) for row in rows]
    made = group(ticket, sums, reward_weights=weights)
    for rollout, row in zip(made.rollouts, rows, strict=True):
        rollout.reward_components = row
    return made


def test_a_step_holds_what_each_reward_function_gave_and_its_weight() -> None:
    """A group names its own weights, as a task file may change under a run; one without components is its reward's."""
    draft = _draft(groups_per_step=4)
    groups = [
        scored("a", {"exact": [1.0, 0.0], "style": [None, 0.5]}, {"exact": 2.0}),
        scored("b", {"exact": [0.0, 1.0]}, {"exact": 2.0}),
        scored("c", {"exact": [0.0, 1.0]}, {"exact": 3.0}),
        group("d", [0.0, 4.0]),
    ]
    draft.add([LeasedGroup(of, 0) for of in groups])
    rollouts = draft.finish().rollouts
    by_weight = {}
    for weight, column in zip(rollouts.reward_weights, rollouts.components.T, strict=True):
        by_weight.setdefault(weight, []).append([None if np.isnan(value) else value for value in column])
    none = None
    assert by_weight == {
        2.0: [[1.0, 0.0, 0.0, 1.0, none, none, none, none]],
        1.0: [[none, 0.5, *[none] * 6], [*[none] * 6, 0.0, 4.0]],
        3.0: [[*[none] * 4, 0.0, 1.0, none, none]],
    }
    np.testing.assert_allclose(np.nansum(rollouts.components * rollouts.reward_weights, axis=1), rollouts.rewards)


def test_equal_sums_of_rewards_that_differ_are_flat_for_grpo_and_not_for_gdpo() -> None:
    arrived = scored("a", {"exact": [1.0, 0.0, 0.0], "style": [0.0, 1.0, 1.0]}, {})
    assert _draft().add([LeasedGroup(arrived, 0)]) == {"a": "zero_variance"}
    draft = _draft(groups_per_step=1, advantage="gdpo")
    assert draft.add([LeasedGroup(arrived, 0)]) == {}
    assert draft.add([LeasedGroup(scored("b", {"exact": [1.0, 1.0]}, {}), 0)]) == {"b": "zero_variance"}
    assert draft.finish().ticket_ids == ["a"]


def test_rewards_are_clipped_for_advantages_and_shown_as_they_came() -> None:
    """Two that the clip makes equal are flat."""
    draft = _draft(groups_per_step=1, advantage="dr_grpo", reward_clip=[-1.0, 1.0])
    arrivals = [LeasedGroup(group("a", [5.0, -0.5]), 0), LeasedGroup(group("b", [5.0, 9.0]), 0)]
    assert draft.add(arrivals) == {"b": "zero_variance"}
    batch = draft.finish()
    assert batch.rollouts.rewards.tolist() == [1.0, -0.5]
    assert advantages_of(batch, "dr_grpo").tolist() == [0.75, -0.75]
    assert sorted(view.reward for view in batch.samples if view.ticket_id == "a") == [-0.5, 5.0]
    assert batch.counts.reward_mean == pytest.approx((5 - 0.5 + 5 + 9) / 4)


def test_every_segment_of_a_rollout_gets_its_advantage() -> None:
    arrived = group("a", [0, 1])
    for number, rollout in enumerate(arrived.rollouts):
        rollout.segments.append(segment((None, None, None, 0, 0), seed=7 + number))
    draft = _draft(groups_per_step=1)
    draft.add([LeasedGroup(arrived, 0)])
    batch = draft.finish()
    given: dict[float, list[int]] = {-1.0: [], 1.0: []}
    for row in batch.rows:
        for token, number in zip(row.targets.tolist(), row.rollout.tolist(), strict=True):
            given[np.sign(batch.rollouts.rewards[number] - 0.5)].append(token)
    wanted = [
        sorted(int(token) for of in rollout.segments for token in of.token_ids[of.loss_mask])
        for rollout in arrived.rollouts
    ]
    assert [sorted(given[sign]) for sign in (-1.0, 1.0)] == wanted
    assert batch.counts.tokens_trained == 2 * (3 + 2)


def test_a_group_that_is_too_old_is_dropped_as_overage_even_without_variance() -> None:
    draft = _draft(version=9)
    assert draft.add([LeasedGroup(group("old", [1, 1]), 0), LeasedGroup(group("older", [0, 1]), 0)]) == {
        "old": "overage",
        "older": "overage",
    }


def test_a_group_that_comes_twice_is_taken_once() -> None:
    draft = _draft(groups_per_step=2)
    arrival = LeasedGroup(group("a", [0, 1]), 0)
    draft.add([arrival])
    draft.add([arrival])
    assert draft.wanted == 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([(0, 0), (0, 1)]), VERSIONS, st.sampled_from(["stop", "length", "context"])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([_draft, _masking]),
)
def test_i1_i2_i4_every_group_and_token_ends_somewhere_and_none_too_old(
    arrivals: list[tuple[tuple[float, ...], list[int | None], FinishReason]], begin: Callable[..., Draft]
) -> None:
    draft = begin(version=6)
    groups = {f"t{i}": group(f"t{i}", rewards, versions) for i, (rewards, versions, _) in enumerate(arrivals)}
    for made, (_, _, end) in zip(groups.values(), arrivals, strict=True):
        made.rollouts[0].finish_reason = end
    dropped = draft.add([LeasedGroup(item, 6) for item in groups.values()])
    assert sorted([*dropped, *draft.ticket_ids]) == sorted(groups)
    if not draft.ticket_ids:
        return
    batch = draft.finish()
    counts = batch.counts
    assert counts.staleness_max <= 2
    assert counts.tokens_sampled == sum(item.sampled_tokens for item in groups.values())
    assert counts.tokens_sampled == (
        counts.tokens_trained + sum(counts.tokens_masked.values()) + sum(counts.tokens_dropped.values())
    )
    assert sum(len(row.scored) for row in batch.rows) == batch.rollouts.tokens.sum() == counts.tokens_trained
    assert counts.rollouts == 2 * len(groups)


def test_a_truncated_rollout_is_masked_and_its_reward_counts_in_the_group() -> None:
    cut_off = group("a", [0.0, 0.5, 1.0])
    cut_off.rollouts[0].finish_reason = "length"
    draft = _masking(groups_per_step=1, advantage="rloo")
    assert draft.add([LeasedGroup(cut_off, 0)]) == {}
    batch = draft.finish()
    assert advantages_of(batch, "rloo").tolist() == [-0.75, 0.0, 0.75], "of 0.5 and 1: against 0 too"
    assert batch.rollouts.tokens.tolist() == [0, 3, 3]
    assert (batch.counts.tokens_masked, batch.counts.tokens_trained) == ({"truncated": 3}, 6)
    assert batch.counts.reward_mean == 0.5


@pytest.mark.parametrize("zero_variance", ["refill", "drop", "keep"])
def test_a_group_of_truncated_rollouts_is_dropped_and_replaced(zero_variance: str) -> None:
    """A step in which nothing trains would divide by zero."""
    cut_off = group("a", [0.0, 1.0])
    for rollout in cut_off.rollouts:
        rollout.finish_reason = "context"
    draft = _masking(groups_per_step=1, zero_variance=zero_variance)
    assert draft.add([LeasedGroup(cut_off, 0)]) == {"a": "truncated"}
    assert draft.wanted == 1
    draft.add([LeasedGroup(group("b", [0, 1]), 0)])
    counts = draft.finish().counts
    assert (counts.tokens_dropped, counts.tokens_trained, counts.groups_dropped) == (
        {"truncated": 6},
        6,
        {"truncated": 1},
    )


def test_each_token_carries_its_staleness() -> None:
    draft = _draft(version=5, groups_per_step=1)
    draft.add([LeasedGroup(group("a", [0, 1], [None, 3, 5, None, 5]), 5)])
    row = draft.finish().rows[0]
    assert row.staleness.tolist() == [2, 0, 0] * 2
    assert row.fresh.tolist() == [False, False, True] * 2


def test_each_token_carries_its_server() -> None:
    draft = _draft(version=5, groups_per_step=2)
    for name, servers in (("a", ["vllm-1", "vllm-0"]), ("b", ["vllm-2"])):
        one = group(name, [0, 1], [None, 5, 5])
        one.server_names = servers
        draft.add([LeasedGroup(one, 5)])
    batch = draft.finish()
    assert batch.rollouts.servers == ("vllm-0", "vllm-1", "vllm-2")
    sampled = [
        (int(rollout), batch.rollouts.servers[server])
        for row in batch.rows
        for rollout, server in zip(row.rollout, row.server, strict=True)
    ]
    assert set(sampled) == {(0, "vllm-1"), (1, "vllm-1"), (2, "vllm-2"), (3, "vllm-2")}


def test_staleness_is_split_at_the_arrival() -> None:
    draft = _draft(version=5)
    draft.add([LeasedGroup(group("a", [0, 1], [None, 3, 4]), 4)])
    counts = draft.finish().counts
    assert (counts.staleness_in_flight, counts.staleness_in_queue) == (1, 1)
    assert counts.two_span_rollouts == 2


def test_tokens_that_train_are_counted_by_staleness_up_to_the_bound() -> None:
    draft = _draft(version=3, groups_per_step=1)
    draft.add([LeasedGroup(group("a", [0, 1], versions=(None, None, 0, 1, 3, 3)), 3)])
    counts = draft.finish().counts
    assert counts.tokens_by_staleness == {"staleness/tokens_0": 4, "staleness/tokens_1": 0, "staleness/tokens_2": 2}
    assert sum(counts.tokens_by_staleness.values()) == counts.tokens_trained, (
        "what is masked for its age is none of them"
    )


def test_each_token_carries_its_rollout_s_number() -> None:
    draft = _draft(groups_per_step=2, advantage_epsilon=1e-9)
    draft.add([LeasedGroup(group("a", [0, 1]), 0), LeasedGroup(group("b", [1, 0]), 0)])
    batch = draft.finish()
    assert sorted(number for row in batch.rows for number in row.rollout.tolist()) == [
        n for n in range(4) for _ in "123"
    ]
    assert batch.rollouts.groups.tolist() == [0, 0, 1, 1]
    given = advantages_of(batch, advantage_epsilon=1e-9)
    np.testing.assert_allclose(given, [-(0.5**0.5), 0.5**0.5, 0.5**0.5, -(0.5**0.5)], rtol=1e-6)


def test_samples_are_the_best_the_worst_and_others_with_what_became_of_them() -> None:
    draft = _draft(version=3, groups_per_step=3)
    draft.add(
        [
            LeasedGroup(group("a", [0.2, 0.3], [None, 1, 2]), 3),
            LeasedGroup(group("b", [0, 1], [None, 3]), 3),
            LeasedGroup(group("c", [0.6, 0.5], [None, 2]), 3),
        ]
    )
    samples = draft.finish().samples
    assert [(view.ticket_id, view.reward) for view in samples[:2]] == [("b", 1.0), ("b", 0.0)]
    assert {view.ticket_id for view in samples[2:]} == {"a", "c"}
    assert {view.ticket_id: view.staleness for view in samples} == {"a": 2, "b": 0, "c": 1}
    assert all(view.step == 1 and view.advantage is not None for view in samples)
    assert samples[0].advantage == pytest.approx(0.5**0.5, rel=1e-3)


def test_samples_are_of_each_role() -> None:
    """The solver's rewards lie between the critic's, which are the best and the worst."""
    draft = _draft(groups_per_step=1, sample_rollouts=3)
    roles = [("critic", 9.0), ("solver", 0.0), ("critic", -9.0), ("solver", 1.0)]
    draft.add([LeasedGroup(group_of_roles(*roles, ticket="a"), 0)])
    batch = draft.finish()
    assert [(view.role, view.reward) for view in batch.samples[:2]] == [("critic", 9.0), ("critic", -9.0)]
    assert batch.samples[2].role == "solver"
    advantage = {view.number: view.advantage for view in batch.samples}
    assert all(advantages_of(batch)[number] == value for number, value in advantage.items())


def test_where_few_groups_train_those_without_variance_are_shown_too() -> None:
    draft = _draft(groups_per_step=3, zero_variance="drop")
    draft.add([LeasedGroup(group("a", [0, 1]), 0), *(LeasedGroup(group(f"flat{i}", [1, 1]), 0) for i in range(9))])
    samples = draft.finish().samples
    assert [view.ticket_id for view in samples] == ["a", "a", "flat0", "flat1"]
    assert [(view.step, view.advantage) for view in samples[2:]] == [(1, None)] * 2, "not trained"


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"sample_rollouts": 0}, 0),
        ({"sample_rollouts": 0, "show_rollout_every": 1}, 1),
        ({"sample_rollouts": 0, "show_rollout_every": 2}, 0),
        ({"sample_rollouts": 3}, 3),
    ],
)
def test_as_many_samples_as_wanted(settings: dict[str, int], count: int) -> None:
    draft = _draft(groups_per_step=2, **settings)
    draft.add([LeasedGroup(group("a", [0, 1]), 0), LeasedGroup(group("b", [0, 1]), 0)])
    assert len(draft.finish().samples) == count


def test_the_step_s_metrics_are_over_dropped_groups_too() -> None:
    draft = _draft(groups_per_step=1)
    draft.add([LeasedGroup(group("flat", [1, 1], epoch=2), 0), LeasedGroup(group("a", [0, 1], epoch=1), 0)])
    counts = draft.finish().counts
    assert (counts.reward_mean, counts.metrics["frac_reward_zero_std"]) == (0.75, 0.5)
    assert counts.metrics["completions/mean_length"] == 3
    assert (counts.tokens, counts.tokens_prompt, counts.epoch) == (20, 8, 2)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("segment_too_long", {"segments": [segment((None,) * 64 + (0,))]}),
        ("reward_not_finite", {"reward": 1.7e308}),
        ("reward_not_finite", {"reward_components": {"accuracy": -1e308}}),
        ("metric_not_finite", {"metrics": {"loss": float("inf")}}),
    ],
)
def test_a_group_that_would_end_the_learner_is_dropped_and_the_step_goes_on(
    reason: str, change: dict[str, Any]
) -> None:
    """A store may hold one from before its door refused it, or from a queue with another run file."""
    poison = group("poison", [-1.0, 1.0, -1.0, 1.0])
    poison.rollouts[1:3] = [msgspec.structs.replace(rollout, **change) for rollout in poison.rollouts[1:3]]
    draft = _draft(groups_per_step=1)
    assert draft.add([LeasedGroup(poison, 0)]) == {"poison": reason}
    assert draft.add([LeasedGroup(group("a", [0, 1]), 0)]) == {}
    batch = draft.finish()
    assert batch.ticket_ids == ["a"]
    told = batch.counts
    assert told.groups_dropped == {reason: 1}
    assert np.isfinite([told.reward_mean, told.reward_std, *told.metrics.values(), *told.task_metrics.values()]).all()


def test_a_draft_that_moves_to_the_step_before_is_what_it_would_have_been_there() -> None:
    """Over age for version 4 is not over age for version 3, and nothing is counted twice."""
    groups = [
        LeasedGroup(group("a", [0, 1], (None, 1, 2, 3)), 3),
        LeasedGroup(group("b", [1, 0], (None, None, 1, 1)), 2),
        LeasedGroup(group("flat", [1, 1], (None, 3, 3)), 3),
    ]
    moved, there = _draft(4, groups_per_step=2), _draft(3, groups_per_step=2)
    assert moved.add(groups[:1]) == {}
    assert moved.move(1, 3) == {}
    assert moved.add(groups[1:]) == there.add(groups) == {"flat": "zero_variance"}
    ours, theirs = moved.finish(), there.finish()
    assert (ours.step, ours.version, ours.counts) == (theirs.step, theirs.version, theirs.counts)
    for row, other in zip(ours.rows, theirs.rows, strict=True):
        assert row.behaviour.tolist() == other.behaviour.tolist()
        assert row.staleness.tolist() == other.staleness.tolist()


def test_i4_what_was_left_out_is_counted_in_the_step_that_is_made() -> None:
    left_out, made = _draft(3, groups_per_step=1), _draft(4, groups_per_step=1)
    left_out.add(
        [LeasedGroup(group("flat", [1, 1], (None, 3, 3)), 3), LeasedGroup(group("bad", [0, 4], (None, 3, 3)), 3)]
    )
    left_out.revoke({"bad": "step_not_finite"})
    made.add([LeasedGroup(group("good", [0, 1], (None, 3, 3, 3)), 3)])
    made.count(left_out)
    made.move(1, 3)
    counts = made.finish().counts
    assert counts.groups_dropped == {"zero_variance": 1, "step_not_finite": 1}
    assert counts.tokens_dropped == {"zero_variance": 4, "step_not_finite": 4}
    assert (counts.tokens_sampled, counts.tokens_trained, counts.rollouts) == (14, 6, 6)
    assert counts.reward_mean == pytest.approx((1 + 1 + 0 + 4 + 0 + 1) / 6)


def test_a_batch_is_the_same_in_whichever_order_its_groups_came() -> None:
    """Or a resumed run would not be the run to the bit."""
    groups = [
        LeasedGroup(group(f"{index}.0", [0, 1], index=index, versions=(None, *[0] * (index + 2))), 0)
        for index in range(4)
    ]
    batches = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        draft = _draft(groups_per_step=4)
        draft.add([groups[place] for place in order])
        batches.append(draft.finish())
    first, second = batches
    assert [row.input_ids.tolist() for row in first.rows] == [row.input_ids.tolist() for row in second.rows]
    assert [row.rollout.tolist() for row in first.rows] == [row.rollout.tolist() for row in second.rows]


def test_a_step_knows_the_turn_of_each_token_and_what_was_seen_before_it() -> None:
    draft = _draft(groups_per_step=2, credit="gigpo")
    first = group_of_turns([0.0, 1.0], [0.5], ticket="a", states=[[5, 9], [5]])
    second = group_of_turns([1.0], [0.0, 0.0, 0.25], ticket="b", states=[[5], [6, 5, 6]])
    second.index = 1
    assert draft.add([LeasedGroup(first, 0), LeasedGroup(second, 0)]) == {}
    batch = draft.finish()
    turns = batch.rollouts.turns
    assert turns is not None
    assert turns.counts.tolist() == [2, 1, 1, 3]
    assert turns.rewards.tolist() == [0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.25]
    assert turns.states.tolist() == [0, 1, 0, 0, 1, 0, 1], "numbered in each group"
    assert [of.turns.tolist() for of in batch.sequences if of.turns is not None] == [
        [0, 0, 0, 1, 1, 1],
        [2, 2, 2],
        [3, 3, 3],
        [4, 4, 4, 5, 5, 5, 6, 6, 6],
    ]
    assert batch.advantages.shape == (7,)
    for row in batch.rows:
        for rollout, turn in zip(row.rollout.tolist(), row.credited.tolist(), strict=True):
            assert turn in turns.of(np.array([rollout]))


def test_a_turn_may_stand_in_a_segment_that_others_have_left() -> None:
    """As an agent's, which comes back to an earlier conversation; order is that of sampling."""
    made = group_of_turns([1.0, 2.0, 4.0], [0.0])
    rollout = made.rollouts[0]
    rollout.segments = [segment((None, 0, 0, None, 0)), segment((None, None, 0), seed=1)]
    rollout.turn_ends = [TurnEnd(0, 3), TurnEnd(1, 3), TurnEnd(0, 5)]
    draft = _draft(groups_per_step=1, credit="turn", advantage="dr_grpo")
    draft.add([LeasedGroup(made, 0)])
    batch = draft.finish()
    assert [of.turns.tolist() for of in batch.sequences if of.turns is not None][:2] == [[0, 0, 0, 2, 2], [1, 1, 1]]
    assert batch.advantages.tolist() == [3.5, 3.0, 2.0, -3.5]


def test_turns_without_a_token_between_them_are_two() -> None:
    """As of an agent that continues its own text: only `turn_ends` tells them apart."""
    made = group_of_turns([1.0, 0.0], [0.0, 0.0])
    for rollout in made.rollouts:
        rollout.segments = [segment((None, 0, 0, 0, 0))]
        rollout.turn_ends = [TurnEnd(0, 2), TurnEnd(0, 5)]
    draft = _draft(groups_per_step=1, credit="turn")
    draft.add([LeasedGroup(made, 0)])
    (first, _) = draft.finish().sequences
    assert first.turns is not None
    assert first.turns.tolist() == [0, 0, 1, 1, 1]


def test_a_group_whose_worker_did_not_say_where_turns_end_has_one_turn_a_rollout() -> None:
    draft = _draft(groups_per_step=1, credit="turn")
    draft.add([LeasedGroup(group("old", [0.0, 1.0]), 0)])
    batch = draft.finish()
    assert batch.rollouts.turns is not None
    assert batch.rollouts.turns.counts.tolist() == [1, 1]
    assert batch.advantages.tolist() == advantages_of(batch).tolist()


@pytest.mark.parametrize(("credit", "flat"), [("episode", True), ("turn", False), ("gigpo", False)])
def test_a_group_of_equal_sums_is_dropped_only_where_its_turns_teach_nothing(credit: str, flat: bool) -> None:
    draft = _draft(groups_per_step=1, credit=credit)
    dropped = draft.add([LeasedGroup(group_of_turns([1.0, 0.0], [0.0, 1.0]), 0)])
    assert dropped == ({"0.0": "zero_variance"} if flat else {})
    assert draft.add([LeasedGroup(group_of_turns([1.0, 0.0], [1.0, 0.0], ticket="b"), 0)]) == {"b": "zero_variance"}


def test_rewards_at_turns_count_as_their_sum_for_episode() -> None:
    """What is shown of a rollout has them, and the tokens of each turn its advantage."""
    made = group_of_turns([0.0, 1.0], [0.0, 0.0])
    plain, by_turn = _draft(groups_per_step=1), _draft(groups_per_step=1, credit="turn", advantage="dr_grpo")
    for draft in (plain, by_turn):
        draft.add([LeasedGroup(made, 0)])
    batch = plain.finish()
    assert batch.rollouts.turns is None
    assert batch.advantages.tolist() == advantages_of(batch).tolist()
    best = by_turn.finish().samples[0]
    assert (best.turn_rewards, best.turn_advantages, best.advantage) == ([0.0, 1.0], [0.5, 0.5], 0.5)


def test_a_trainer_of_one_s_own_gets_the_advantage_of_each_turn() -> None:
    draft = _draft(groups_per_step=1, credit="turn", advantage="dr_grpo")
    draft.add([LeasedGroup(group_of_turns([0.0, 1.0], [2.0, 0.0]), 0)])
    batch = draft.finish()
    tokens = TokenBatch.of(1, 0, batch.sequences, batch.rollouts.rewards, batch.advantages, np.full(2, 0.25))
    assert tokens.advantages.tolist() == [[0, -0.5, -0.5, 0, 0.5, 0.5], [0, 0.5, 0.5, 0, -0.5, -0.5]]
    assert tokens.rewards.tolist() == [1.0, 2.0]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3), st.booleans()), min_size=2, max_size=4
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_queue_counts_those_groups_as_flat_that_credit_by_turn_drops(
    rollouts: list[tuple[list[float], bool]], discount: float
) -> None:
    """Some rollouts have rewards at their turns, others one at the end: as discounted they differ by their lengths."""
    made = group_of_turns(*(rewards for rewards, _ in rollouts))
    for rollout, (_, whole) in zip(made.rollouts, rollouts, strict=True):
        if whole:
            rollout.turn_rewards = msgspec.UNSET
    dropped = _draft(credit="turn", credit_discount=discount).add([LeasedGroup(made, 0)])
    assert bool(dropped) is not made.differs_by_turn(discount)


def taught(ticket: str, logprob: float = -1.0, k: int = 0) -> Group:
    """A group whose tokens a teacher has scored, with its k likeliest ids."""
    made = group(ticket)
    for one in (each for rollout in made.rollouts for each in rollout.segments):
        count = one.sampled_tokens
        one.teacher = np.full(count, logprob, np.float32)
        if k:
            one.teacher_top = TeacherTop(np.arange(count * k, dtype=np.int32), np.full(count * k, -2.0, np.float32), k)
    return made


@pytest.mark.parametrize("k", [0, 2])
def test_what_the_teacher_said_stands_at_the_tokens_that_were_sampled(k: int) -> None:
    teacher = {"url": "http://127.0.0.1:9", "top_k": k}
    draft = Draft(config(LEARNER, teacher=teacher, learner={"groups_per_step": 2}), 1, 0, "1-1")
    others = {"untaught": group("untaught"), "of another k": taught("of another k", k=3)}
    dropped = draft.add([LeasedGroup(of, 0) for of in (*others.values(), taught("a", -1.0, k), taught("b", -2.0, k))])
    assert dropped == dict.fromkeys(others, "no_teacher")
    batch = draft.finish()
    for row in batch.rows:
        assert row.teacher is not None
        assert row.teacher.tolist() == [-1.0 - (of // 2) for of in row.rollout.tolist()]
        if k:
            assert row.teacher_ids is not None
            shown = dict(zip(row.targets.tolist(), row.teacher_ids.tolist(), strict=True))
            assert set(map(tuple, shown.values())) <= {(0, 1), (2, 3), (4, 5)}
    assert sum(len(row.rollout) for row in batch.rows) == 12


def test_what_a_teacher_said_that_the_run_has_no_more_teaches_nothing() -> None:
    """A resume without [teacher] finds groups from before it in the queue, among new ones."""
    draft = _draft(groups_per_step=2)
    assert draft.add([LeasedGroup(taught("a"), 0), LeasedGroup(group("b"), 0)]) == {}
    batch = draft.finish()
    assert [row.teacher for row in batch.rows] == [None] * len(batch.rows)
    assert [of.teacher for of in batch.sequences] == [None] * 4
