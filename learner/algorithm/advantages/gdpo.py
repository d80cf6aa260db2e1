"""`advantage = "gdpo"`: each reward function has its own deviation in the group, so none drowns another."""

from __future__ import annotations

import numpy as np

from learner.algorithm.advantages.base import Advantage, standardised
from learner.algorithm.rollouts import Floats, StepRollouts


class Gdpo(Advantage):
    """GDPO (arXiv:2601.05242), as TRL's `multi_objective_aggregation="normalize_then_sum"`.

    For each reward function k, (r_k - mean_k) / (std_k + `advantage_epsilon`) over the group's rollouts that it gave a
    number; the weighted sum over k, to which a function that gave None adds nothing; of that,
    (A - mean) / (std + `advantage_epsilon`) over the step. Deviations are the sample's. A rollout that no function gave
    a number has advantage 0 and no part in mean and deviation.

    Choose it for several reward functions of unlike scales or rarity, whose sum would hide one of them.
    """

    def compute(self, rollouts: StepRollouts) -> Floats:
        epsilon = self.section.advantage_epsilon
        given = ~np.isnan(rollouts.components)
        normalised = np.zeros_like(rollouts.components)
        for members in rollouts.by_group():
            for of, column, known in zip(normalised.T, rollouts.components.T, given.T, strict=True):
                scored = members[known[members]]
                values = column[scored]
                if not _is_flat(values):
                    of[scored] = standardised(values, epsilon)
        sums = normalised @ rollouts.reward_weights
        scored = given.any(axis=1)
        advantages = np.zeros(len(rollouts))
        if scored.any():
            advantages[scored] = standardised(sums[scored], epsilon)
        return advantages

    def is_flat(self, group: StepRollouts) -> bool:
        """Where each reward function that counts is flat: two may differ and their sum be the same."""
        counts = group.reward_weights != 0
        return all(_is_flat(column[~np.isnan(column)]) for column in group.components.T[counts])


def _is_flat(values: Floats) -> bool:
    return len(values) < 2 or bool(np.ptp(values) == 0)
