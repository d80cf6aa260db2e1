"""Credit rules against plain computations in float64, turn by turn, and what all of them must keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.algorithm import credit
from slipstream.learner.algorithm.credit import CREDITS, ByTurn
from slipstream.learner.algorithm.step_data import StepRollouts, StepTurns
from slipstream.protocol.config import LearnerSection
from tests.kit import LEARNER, config

BY_TURN = [name for name, rule in CREDITS.items() if rule.by_turn]
ADVANTAGES = ("grpo", "async_grpo", "dr_grpo", "rloo")

# The turns of one rollout: the reward at each, and the state before it.
Turns = list[tuple[float, int]]
TURN = st.tuples(st.integers(-3, 3).map(float), st.integers(0, 2))
GROUP = st.lists(st.lists(TURN, min_size=1, max_size=5), min_size=1, max_size=5)


def step(*groups: Sequence[Turns], roles: Sequence[int] | None = None) -> StepRollouts:
    """The rollouts of some groups, whose rewards are the sums of those at their turns."""
    rollouts = [turns for group in groups for turns in group]
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    rewards = np.array([sum(reward for reward, _ in turns) for turns in rollouts])
    flat = [turn for turns in rollouts for turn in turns]
    return StepRollouts(
        rewards,
        numbers,
        np.full(len(rollouts), 3),
        rewards[:, None],
        np.ones(1),
        roles=None if roles is None else np.array(roles),
        turns=StepTurns(
            np.array([len(turns) for turns in rollouts]),
            np.array([reward for reward, _ in flat]),
            np.array([state for _, state in flat]),
        ),
    )


def rule(name: str, advantage: str = "grpo", **settings: Any) -> credit.Credit:
    return credit.build(LearnerSection(credit=name, advantage=advantage, **settings))


def compared(values: Sequence[float], own: float, advantage: str) -> float:
    """`own`, one of the values, among them; with the epsilons of the defaults."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    match advantage:
        case "grpo":
            return (own - mean) / (math.sqrt(squares / (len(values) - 1)) + 1e-4)
        case "async_grpo":
            return (own - mean) / (math.sqrt(squares / len(values)) + 1e-8)
        case "dr_grpo":
            return own - mean
    return own - (math.fsum(values) - own) / (len(values) - 1)


def return_of(turns: Turns, turn: int, discount: float) -> float:
    return math.fsum(discount ** (k - turn) * turns[k][0] for k in range(turn, len(turns)))


def plain_turn(group: Sequence[Turns], discount: float, advantage: str) -> list[list[float]]:
    def held(turns: Turns, turn: int) -> float:
        return return_of(turns, min(turn, len(turns) - 1), discount)

    return [
        [compared([held(other, t) for other in group], held(turns, t), advantage) for t in range(len(turns))]
        for turns in group
    ]


def plain_gigpo(group: Sequence[Turns], discount: float, weight: float, advantage: str) -> list[list[float]]:
    sums = [math.fsum(reward for reward, _ in turns) for turns in group]
    seen: dict[int, list[float]] = {}
    for turns in group:
        for t, (_, state) in enumerate(turns):
            seen.setdefault(state, []).append(return_of(turns, t, discount))
    return [
        [
            compared(sums, own, advantage) + weight * compared(seen[state], return_of(turns, t, discount), advantage)
            for t, (_, state) in enumerate(turns)
        ]
        for turns, own in zip(group, sums, strict=True)
    ]


def flat(by_rollout: list[list[float]]) -> list[float]:
    return [value for values in by_rollout for value in values]


def test_the_run_file_offers_every_variant() -> None:
    assert set(CREDITS) == set(get_args(LearnerSection.model_fields["credit"].annotation))


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(deadline=None)
@given(groups=st.lists(GROUP, min_size=1, max_size=3), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_is_the_return_among_the_group_s_at_the_same_turn(
    advantage: str, groups: list[list[Turns]], discount: float
) -> None:
    found = rule("turn", advantage, **({} if discount == 1 else {"credit_discount": discount}))(step(*groups))
    expected = [value for group in groups for value in flat(plain_turn(group, discount, advantage))]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(deadline=None)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=3),
    discount=st.sampled_from([0.0, 0.5, 1.0]),
    weight=st.sampled_from([0.25, 1.0, 2.0]),
)
def test_gigpo_adds_the_return_among_turns_of_the_same_state(
    advantage: str, groups: list[list[Turns]], discount: float, weight: float
) -> None:
    found = rule("gigpo", advantage, credit_discount=discount, gigpo_weight=weight)(step(*groups))
    expected = [value for group in groups for value in flat(plain_gigpo(group, discount, weight, advantage))]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_worked_by_hand() -> None:
    """Three rollouts of 2, 2 and 1 turns; the second turn of the first two has state 7, which the third begins in."""
    rollouts = step([[(1.0, 0), (0.0, 7)], [(0.0, 0), (4.0, 7)], [(1.0, 7)]])
    # Returns at turn 0: 1, 4, 1; at turn 1: 0, 4 and, of the one that has ended, 1.
    turn = rule("turn", "dr_grpo")(rollouts)
    np.testing.assert_allclose(turn, [1 - 2, 0 - 5 / 3, 4 - 2, 4 - 5 / 3, 1 - 2], rtol=1e-6)
    # At half the weight of what is a turn later: 1, 0 + 2, 1.
    halved = rule("turn", "dr_grpo", credit_discount=0.5)(rollouts)
    np.testing.assert_allclose(halved, [1 - 4 / 3, 0 - 5 / 3, 2 - 4 / 3, 4 - 5 / 3, 1 - 4 / 3], rtol=1e-6)
    # Rewards 1, 4, 1; state 0 has the returns 1 and 4, state 7 has 0, 4 and 1.
    gigpo = rule("gigpo", "dr_grpo", gigpo_weight=2.0)(rollouts)
    state_7 = [2 * (value - 5 / 3) for value in (0, 4, 1)]
    expected = [-1 + 2 * -1.5, -1 + state_7[0], 2 + 2 * 1.5, 2 + state_7[1], -1 + state_7[2]]
    np.testing.assert_allclose(gigpo, expected, rtol=1e-6)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(deadline=None)
@given(
    groups=st.lists(
        st.lists(
            st.tuples(st.floats(-1e3, 1e3).map(lambda reward: reward + 0.0), st.integers(1, 6)), min_size=1, max_size=8
        ),
        min_size=1,
        max_size=3,
    )
)
def test_with_one_reward_at_the_end_turn_is_episode_to_the_bit(
    advantage: str, groups: list[list[tuple[float, int]]]
) -> None:
    """Whatever the numbers of turns."""
    made = step(*([[(0.0, 0)] * (count - 1) + [(reward, 0)] for reward, count in group] for group in groups))
    assert made.turns is not None
    of_rollouts = rule("episode", advantage)(made)
    assert rule("turn", advantage)(made).tobytes() == np.repeat(of_rollouts, made.turns.counts).tobytes()


@pytest.mark.parametrize("name", BY_TURN)
@settings(deadline=None)
@given(reward=st.floats(-1e6, 1e6), counts=st.integers(1, 5), size=st.integers(1, 8))
def test_rollouts_that_are_alike_give_exactly_zero(name: str, reward: float, counts: int, size: int) -> None:
    """Those of a state too: rounding alone would not."""
    alike = step([[(reward, turn) for turn in range(counts)]] * size)
    assert not rule(name)(alike).any()
    assert rule(name).stays_flat(alike)


@pytest.mark.parametrize("name", BY_TURN)
def test_a_group_of_equal_sums_is_flat_only_where_its_turns_are(name: str) -> None:
    """The first was rewarded early, the second late: at the second turn their returns differ, and so do those of
    state 0, in which both begin their second turn."""
    group = step([[(1.0, 5), (0.0, 0)], [(0.0, 6), (1.0, 0)]])
    assert rule("episode").stays_flat(group)
    assert not rule(name).stays_flat(group)
    assert rule(name)(group)[[1, 3]].all()


def test_a_state_that_came_once_adds_nothing() -> None:
    group = step([[(1.0, 0), (0.0, 1)], [(0.0, 2), (0.0, 3)]])
    of_rollouts = rule("episode")(group)
    np.testing.assert_array_equal(rule("gigpo")(group), np.repeat(of_rollouts, 2))


@pytest.mark.parametrize("name", BY_TURN)
@settings(deadline=None)
@given(groups=st.lists(GROUP, min_size=1, max_size=3), random=st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(name: str, groups: list[list[Turns]], random: Any) -> None:
    straight = step(*groups)
    orders = [random.sample(range(len(group)), len(group)) for group in groups]
    shuffled = step(*([group[at] for at in order] for group, order in zip(groups, orders, strict=True)))
    assert straight.turns is not None
    starts = np.cumsum([0, *(len(group) for group in groups)])
    members = np.array([starts[number] + at for number, order in enumerate(orders) for at in order])
    expected = rule(name)(straight)[straight.turns.of(members)]
    np.testing.assert_allclose(rule(name)(shuffled), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BY_TURN)
def test_roles_are_compared_apart(name: str) -> None:
    """As two groups are, though they meet the same states."""
    one: list[Turns] = [[(1.0, 0), (0.0, 1)], [(0.0, 0), (2.0, 1)]]
    other: list[Turns] = [[(9.0, 0), (5.0, 1)], [(7.0, 0), (5.0, 1)]]
    mixed = step([one[0], other[0], one[1], other[1]], roles=[0, 1, 0, 1])
    assert mixed.turns is not None
    found = rule(name)(mixed)
    apart = np.concatenate([rule(name)(step(one)), rule(name)(step(other))])
    np.testing.assert_array_equal(found[mixed.turns.of(np.array([0, 2, 1, 3]))], apart)


@settings(deadline=None)
@given(groups=st.lists(GROUP, min_size=1, max_size=3), data=st.data())
def test_taking_rollouts_takes_their_turns(groups: list[list[Turns]], data: st.DataObject) -> None:
    made = step(*groups)
    assert made.turns is not None
    members = np.array(sorted(data.draw(st.sets(st.integers(0, len(made) - 1), min_size=1))))
    taken = made.take(members).turns
    rollouts = [turns for group in groups for turns in group]
    assert taken is not None
    assert taken.counts.tolist() == [len(rollouts[at]) for at in members]
    expected = [turn for at in members for turn in rollouts[at]]
    assert list(zip(taken.rewards.tolist(), taken.states.tolist(), strict=True)) == expected


@pytest.mark.parametrize("name", BY_TURN)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("advantage", "gdpo"),
        ("advantage", "batch"),
        ("normalise_advantages", True),
        ("reward_clip", [-1.0, 1.0]),
        ("kl_in_reward", True),
    ],
)
def test_what_is_of_whole_rollouts_is_refused(name: str, setting: str, value: Any) -> None:
    kl = {"kl_coef": 0.1} if setting == "kl_in_reward" else {}
    with pytest.raises(ValueError, match=rf"learner\.{setting} = .* cannot go with learner\.credit = \"{name}\""):
        config(LEARNER, learner={"credit": name, setting: value, **kl})


@pytest.mark.parametrize(
    ("setting", "credits"), [("credit_discount", ["episode"]), ("gigpo_weight", ["episode", "turn"])]
)
def test_a_setting_that_the_rule_does_not_read_is_refused(setting: str, credits: list[str]) -> None:
    for name in credits:
        with pytest.raises(ValueError, match=rf"learner\.{setting} = 0.5 does nothing with credit = "):
            config(LEARNER, learner={"credit": name, setting: 0.5})


def test_the_preset_rloo_goes_with_turns_as_long_as_it_has_no_kl() -> None:
    """It sets kl_in_reward, which waits for kl_coef."""
    learner = config(LEARNER, learner={"credit": "turn", "algorithm": "rloo"}).learner
    assert isinstance(credit.build(learner), ByTurn)
