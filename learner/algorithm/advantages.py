"""Advantages: how the rewards of a step say which of its rollouts to reinforce, and by how much.

An advantage is a pure function of rewards. A group whose rewards are all equal gets exactly 0, so it has no gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from slipstream.learner.algorithm.step_data import Floats, StepRollouts
from slipstream.protocol.config import LearnerSection
from slipstream.protocol.messages import are_equal


class Advantage(ABC):
    """The interface of an advantage: how much better each rollout of a step did than the others.

    A variant is a formula, in `compute`. It reads its own settings from `section`.
    """

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    def __call__(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        """Compute the advantages of a step.

        With `normalise_advantages` they become (A - mean) / (std + `advantage_epsilon`) over the step, as in TRL's
        RLOOTrainer. Flat groups then get exactly 0: rounding must not make a gradient where nothing can be learnt.

        Args:
            rollouts: The step's rollouts, with finite rewards.

        Returns:
            float32 [S], one per rollout.
        """
        advantages = self.compute(rollouts)
        if self.section.normalise_advantages:
            advantages = standardised(advantages, self.section.advantage_epsilon)
        for members in rollouts.by_group():
            if self.is_flat(rollouts.take(members)):
                advantages[members] = 0.0
        return advantages.astype(np.float32)

    @abstractmethod
    def compute(self, rollouts: StepRollouts) -> Floats:
        """Compute the formula.

        Returns:
            Finite float64 [S]. The values of a flat group do not matter: they are replaced by 0.
        """

    def is_flat(self, group: StepRollouts) -> bool:
        """Say whether nothing can be learnt from the rollouts of one group.

        `learner.zero_variance`, which drops such groups, and the advantages, which give them no gradient, must agree on
        it.

        Args:
            group: At least one rollout.
        """
        return are_equal(group.rewards)

    def stays_flat(self, group: StepRollouts) -> bool:
        """Say whether a group is known to be flat before the step: with `kl_in_reward`, the KL will make equal rewards
        differ."""
        penalised = self.section.kl_in_reward and self.section.kl_coef > 0
        return not (penalised and len(group) > 1) and all(
            self.is_flat(group.take(members)) for members in group.by_group()
        )


class GroupAdvantage(Advantage):
    """The interface of an advantage that looks at one group at a time."""

    def compute(self, rollouts: StepRollouts) -> Floats:
        advantages = np.zeros(len(rollouts))
        for members in rollouts.by_group():
            if len(members) > 1:
                advantages[members] = self.of_group(rollouts.rewards[members])
        return advantages

    @abstractmethod
    def of_group(self, rewards: Floats) -> Floats:
        """Compute the formula for one group.

        Args:
            rewards: float64 [G], G >= 2.

        Returns:
            float64 [G].
        """


def sample_std(values: Floats) -> float:
    """Return the standard deviation of a sample (divided by n - 1), as `torch.std`; 0 of fewer than two values."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def standardised(values: Floats, epsilon: float) -> Floats:
    """Return (x - mean) / (std + epsilon) of at least one value, with the standard deviation of a sample."""
    return np.asarray((values - values.mean()) / (sample_std(values) + epsilon))


class Grpo(GroupAdvantage):
    """(r - mean) / (std + `advantage_epsilon`), with the sample's standard deviation (arXiv:2402.03300, section 4.1.2;
    TRL's GRPOTrainer).

    Choose it first: all groups count alike, whatever the scale of their rewards.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return standardised(rewards, self.section.advantage_epsilon)


# TRL's AsyncGRPOTrainer has this constant and no setting for it.
_EPSILON = 1e-8


class AsyncGrpo(GroupAdvantage):
    """(r - mean) / (std + 1e-8), with the population's standard deviation, as in TRL's AsyncGRPOTrainer.

    Choose it to compare with that trainer.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return np.asarray((rewards - rewards.mean()) / (float(rewards.std()) + _EPSILON))


class DrGrpo(GroupAdvantage):
    """r - mean (arXiv:2503.20783).

    Choose it where rewards are on one scale and many groups are nearly solved or nearly hopeless: dividing by their
    small deviations would amplify noise.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return np.asarray(rewards - rewards.mean())


class Rloo(GroupAdvantage):
    """r_i - mean of r_j over j != i: REINFORCE leave-one-out (arXiv:2402.14740).

    Choose it for an unbiased baseline, and for rewards whose size means something.
    """

    def of_group(self, rewards: Floats) -> Floats:
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return np.asarray(rewards - others)


class Batch(DrGrpo):
    """(r - mean of the group) / (std of the step + `advantage_epsilon`), with the sample's standard deviation over the
    step's rollouts (arXiv:2508.08221). Groups that `learner.zero_variance` drops do not count.

    Choose it for small groups, where a group's own standard deviation is noise.
    """

    def compute(self, rollouts: StepRollouts) -> Floats:
        return super().compute(rollouts) / (sample_std(rollouts.rewards) + self.section.advantage_epsilon)


class Gdpo(Advantage):
    """GDPO (arXiv:2601.05242): for each reward function k, (r_k - mean_k) / (std_k + `advantage_epsilon`) over the
    group; then the weighted sum over k; then (A - mean) / (std + `advantage_epsilon`) of these sums over the step, with
    the sample's standard deviations. A reward of None adds nothing. A rollout without any reward has advantage 0 and
    does not count.

    Choose it for several reward functions of unlike scale or rarity, where a plain sum would hide one of them.
    """

    def compute(self, rollouts: StepRollouts) -> Floats:
        epsilon = self.section.advantage_epsilon
        given = ~np.isnan(rollouts.components)
        normalised = np.zeros_like(rollouts.components)
        for members in rollouts.by_group():
            for of, column, known in zip(normalised.T, rollouts.components.T, given.T, strict=True):
                scored = members[known[members]]
                values = column[scored]
                if not are_equal(values):
                    of[scored] = standardised(values, epsilon)
        sums = normalised @ rollouts.reward_weights
        scored = given.any(axis=1)
        advantages = np.zeros(len(rollouts))
        if scored.any():
            advantages[scored] = standardised(sums[scored], epsilon)
        return advantages

    def is_flat(self, group: StepRollouts) -> bool:
        """Say whether every reward function that counts is flat: two of them may differ and their sum be the same."""
        counts = group.reward_weights != 0
        return all(are_equal(column[~np.isnan(column)]) for column in group.components.T[counts])


ADVANTAGES: dict[str, type[Advantage]] = {
    "grpo": Grpo,
    "async_grpo": AsyncGrpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "batch": Batch,
    "gdpo": Gdpo,
}


def build(section: LearnerSection) -> Advantage:
    """Make the variant that `learner.advantage` names."""
    return ADVANTAGES[section.advantage](section)
