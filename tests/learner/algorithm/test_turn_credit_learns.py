"""A toy of twenty turns in which one matters: how many steps each credit rule needs.

`python -m tests.learner.algorithm.test_turn_credit_learns` prints them at other rates.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from slipstream.learner.algorithm.algorithm import Algorithm
from slipstream.learner.algorithm.credit import CREDITS
from slipstream.learner.algorithm.step_data import StepRollouts, StepTurns
from slipstream.protocol.config import LearnerSection
from tests.kit.learner import tokens

TURNS, ACTIONS, GROUP = 20, 8, 8
# The turn that matters, and its action.
KEY, RIGHT = 12, 2
# The best rate for "episode" of those from 0.25 to 16.
RATE, SUCCESS, MOST = 4.0, 0.9, 1000
SEEDS = range(5)


def steps_to_success(credit: str, seed: int, rate: float = RATE) -> int:
    """Count the steps until the right action is taken with probability 0.9, at most `MOST`.

    The policy is a table: its logits at each turn. At its turn the right action is rewarded by 1; every other turn is
    rewarded by luck, whatever is done: a normal number of deviation 1.
    """
    random = np.random.default_rng(seed)
    section = LearnerSection(credit=credit, **({} if credit == "episode" else {"credit_discount": 0.5}))
    algorithm = Algorithm(section, longest=TURNS)
    logits = torch.zeros(TURNS, ACTIONS, requires_grad=True)
    optimiser = torch.optim.SGD([logits], lr=rate * TURNS)
    for step in range(MOST):
        policy = logits.detach().softmax(1).double().numpy()
        if policy[KEY, RIGHT] >= SUCCESS:
            return step
        actions = np.stack([random.choice(ACTIONS, GROUP, p=row / row.sum()) for row in policy], axis=1)
        rewards = random.standard_normal((GROUP, TURNS))
        rewards[:, KEY] = actions[:, KEY] == RIGHT
        counts, sums = np.full(GROUP, TURNS), rewards.sum(1)
        rollouts = StepRollouts(
            sums,
            np.zeros(GROUP, dtype=np.int64),
            counts,
            sums[:, None],
            np.ones(1),
            turns=StepTurns(counts, rewards.ravel(), np.tile(np.arange(TURNS), GROUP)),
        )
        advantages = algorithm.advantages(rollouts)
        advantages = np.repeat(advantages, TURNS) if credit == "episode" else advantages
        rollout = torch.arange(GROUP).repeat_interleave(TURNS)
        chosen = logits.log_softmax(1)[torch.arange(TURNS).repeat(GROUP), torch.from_numpy(actions.ravel())]
        weights = algorithm.weights(rollouts)[rollout.numpy()]
        made = tokens(np.ones(GROUP * TURNS), advantages, weights, rollout=rollout, behaviour=chosen.detach())
        optimiser.zero_grad()
        algorithm(made.but(logprobs=chosen)).losses.sum().backward()
        optimiser.step()
    return MOST


@pytest.mark.parametrize("credit", ["turn", "gigpo"])
def test_credit_by_turn_needs_at_most_half_the_steps(credit: str) -> None:
    by_episode = [steps_to_success("episode", seed) for seed in SEEDS]
    by_turn = [steps_to_success(credit, seed) for seed in SEEDS]
    assert sum(by_turn) <= sum(by_episode) / 2, (by_turn, by_episode)
    assert max(by_turn) < MOST


if __name__ == "__main__":
    for name in CREDITS:
        for rate in (0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 16.0):
            print(json.dumps({"credit": name, "rate": rate, "steps": [steps_to_success(name, s, rate) for s in SEEDS]}))
