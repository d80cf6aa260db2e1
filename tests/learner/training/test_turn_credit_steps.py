"""Credit by turn in a whole step: against a plain loss in float64, over packings, ranks' messages and objectives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm.objectives import OBJECTIVES
from slipstream.learner.algorithm.step_data import StepRollouts, StepTurns
from slipstream.learner.feed.packing import PackedRow, RankRows, Sample, pack
from slipstream.learner.model.policy import Policy
from slipstream.learner.ranks.messages import decode_message, encode_message
from slipstream.learner.training.base import StepMetrics
from slipstream.learner.training.trainer import PolicyTrainer
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import gradients, sample, step_rollouts

# Of each rollout: its segments' lengths, and the turns whose tokens stand in each. The second turn of the third
# rollout is in its second segment, the third one in its first again.
ROLLOUTS: Sequence[Sequence[tuple[int, Sequence[int]]]] = [
    [(18, (0, 1, 2))],
    [(14, (0, 1))],
    [(15, (0, 2)), (9, (1,))],
    [(11, (0,))],
]
COUNTS = (3, 2, 3, 1)
REWARDS = (0.5, 0.0, 1.0, 0.0, -1.0, 0.25, 0.0, 0.5, 2.0)
STATES = (0, 1, 2, 0, 2, 0, 1, 1, 0)
# Of a group each; what `plain` computes.
ADVANTAGES: dict[str, list[float]] = {
    # Returns 1.5 1 1, -1 -1, .75 .5 .5, 2; among all four at each turn, those that have ended by their last.
    "turn": [
        *(1.5 - (1.5 - 1 + 0.75 + 2) / 4, 1 - (1 - 1 + 0.5 + 2) / 4, 1 - (1 - 1 + 0.5 + 2) / 4),
        *(-1 - (1.5 - 1 + 0.75 + 2) / 4, -1 - (1 - 1 + 0.5 + 2) / 4),
        *(0.75 - (1.5 - 1 + 0.75 + 2) / 4, 0.5 - (1 - 1 + 0.5 + 2) / 4, 0.5 - (1 - 1 + 0.5 + 2) / 4),
        2 - (1.5 - 1 + 0.75 + 2) / 4,
    ],
    # Rewards 1.5, -1, .75, 2; state 0 has the returns 1.5, -1, .75, 2, state 1 has 1, .5, .5, state 2 has 1, -1.
    "gigpo": [
        *(2 * (1.5 - 3.25 / 4), 1.5 - 3.25 / 4 + 1 - 2 / 3, 1.5 - 3.25 / 4 + 1),
        *(2 * (-1 - 3.25 / 4), -1 - 3.25 / 4 - 1),
        *(2 * (0.75 - 3.25 / 4), 0.75 - 3.25 / 4 + 0.5 - 2 / 3, 0.75 - 3.25 / 4 + 0.5 - 2 / 3),
        2 * (2 - 3.25 / 4),
    ],
}


def samples() -> list[Sample]:
    """One sample for each segment; the first two rollouts have the beginning of a prompt in common."""
    firsts = np.cumsum([0, *COUNTS])
    found = []
    for number, segments in enumerate(ROLLOUTS):
        for length, turns in segments:
            item = sample(length, 4, len(found), number)
            item.token_ids[:3] = (7, 8, 9)
            parts = np.array_split(np.arange(4, length), len(turns))
            numbers = np.full(length, firsts[number])
            for part, turn in zip(parts, turns, strict=True):
                numbers[part] = firsts[number] + turn
            found.append(replace(item, turns=numbers))
    return found


def rollouts_of(items: Sequence[Sample]) -> StepRollouts:
    turns = StepTurns(np.array(COUNTS), np.array(REWARDS), np.array(STATES))
    sums = np.add.reduceat(turns.rewards, turns.firsts)
    return replace(step_rollouts(items, group_size=4), rewards=sums, components=sums[:, None], turns=turns)


def step(policy: Policy, rows: list[PackedRow], rollouts: StepRollouts, **settings: Any) -> StepMetrics:
    """One step whose gradients stay in the policy, unclipped."""
    section = LearnerSection(max_grad_norm=1e9, advantage="dr_grpo", **settings)
    trainer = PolicyTrainer(policy, section, longest=64)
    trainer.optimiser.zero_grad = lambda: None
    return trainer.step(rows, rollouts)


def near(policy: Policy, items: Sequence[Sample]) -> list[Sample]:
    """The samples as if a policy a little older had sampled them."""
    random = np.random.default_rng(0)
    moved = []
    for item in items:
        scores = np.concatenate([[0.0], policy.score(item.token_ids.tolist())])
        behaviour = np.where(item.weights > 0, scores + random.normal(0.01, 0.1, len(item)), 0.0)
        moved.append(replace(item, behaviour=behaviour.astype(np.float32)))
    return moved


@pytest.mark.parametrize("credit", ADVANTAGES)
def test_the_gradient_is_that_of_a_plain_loss_in_float64(make_policy: Callable[..., Policy], credit: str) -> None:
    """loss = -(sum over tokens of r A(turn)) / tokens, where r = p / p_old has the gradient."""
    items = near(make_policy(), samples())
    policy = make_policy()
    metrics = step(policy, pack(items, 40), rollouts_of(items), credit=credit, objective="importance")

    model = copy.deepcopy(make_policy("eager").model).double()
    tokens = sum(np.count_nonzero(item.weights) for item in items)
    loss = torch.zeros((), dtype=torch.float64)
    for item in items:
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
        logprobs = model(ids).logits[0].log_softmax(-1)
        assert item.turns is not None
        for place in np.flatnonzero(item.weights):
            ratio = (logprobs[place - 1, ids[0, place]] - float(item.behaviour[place])).exp()
            loss = loss - ratio * ADVANTAGES[credit][item.turns[place]] / tokens
    loss.backward()  # type: ignore[no-untyped-call]

    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    expected = gradients(model)
    found = gradients(policy.model)
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), expected[name], atol=2e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_every_objective_does_not_depend_on_the_packing(
    make_policy: Callable[..., Policy], name: str
) -> None:
    """Nor on whether rows share tokens."""
    items = near(make_policy(), samples())
    settings = {"objective": name, "credit": "turn", "clip_high": 0.1, "clip_low": 0.05}
    found = []
    for budget, branches in ((200, True), (40, True), (18, True), (200, False)):
        policy = make_policy()
        metrics = step(policy, pack(items, budget, branches), rollouts_of(items), **settings)
        found.append((metrics, gradients(policy)))
    (whole, expected), *others = found
    assert whole.grad_norm is not None
    assert whole.grad_norm > 0.01
    for metrics, actual in others:
        assert metrics.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-6)
        for key, gradient in actual.items():
            torch.testing.assert_close(gradient, expected[key], atol=2e-6, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_reward_at_the_end_trains_as_today_to_the_bit(make_policy: Callable[..., Policy], name: str) -> None:
    items = near(make_policy(), samples())
    rollouts = rollouts_of(items)
    assert rollouts.turns is not None
    at_end = np.zeros(len(rollouts.turns))
    at_end[np.cumsum(COUNTS) - 1] = rollouts.rewards
    late = replace(rollouts, turns=replace(rollouts.turns, rewards=at_end))
    today = [replace(item, turns=None) for item in items]
    settings: dict[str, Any] = {
        "objective": name,
        "off_policy_mask_threshold": 0.001,
        "correction": "sequence_truncate",
    }
    one, other = make_policy(), make_policy()
    by_episode = step(one, pack(today, 40), replace(rollouts, turns=None), **settings)
    by_turn = step(other, pack(items, 40), late, credit="turn", **settings)
    assert by_turn.loss == by_episode.loss
    assert by_turn.objective == by_episode.objective
    for key, gradient in gradients(one).items():
        assert torch.equal(gradient, gradients(other)[key]), key


def test_ranks_get_the_turns_of_a_step() -> None:
    items = samples()
    rollouts = rollouts_of(items)
    share = RankRows(pack(items, 40), rollouts, False)
    got = RankRows.of(decode_message(encode_message(share.plain())))
    assert got.rollouts.turns is not None
    for name, values in vars(rollouts.turns).items():
        np.testing.assert_array_equal(getattr(got.rollouts.turns, name), values)
    for row, sent in zip(got.rows, share.rows, strict=True):
        assert torch.equal(row.credited, sent.credited)
        assert row.turn is not None
