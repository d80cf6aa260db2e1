"""The face of an advantage.

`advantage = "async_grpo"`: as `grpo`, with the deviation of TRL's asynchronous trainer.

`advantage = "dr_grpo"`: distance from the group's mean reward.

`advantage = "batch"`: distance from the group's mean reward, in standard deviations of the step's rewards.

`advantage = "gdpo"`: each reward function has its own deviation in the group, so none drowns another.

`advantage = "grpo"`: distance from the group's mean reward, in standard deviations.

`advantage = "rloo"`: distance from the mean reward of the others.

Advantages, one file a variant: how the rewards of a step say which of its rollouts to reinforce.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from learner.algorithm.step_data import Floats, StepRollouts
from protocol.config import LearnerSection


class Advantage(ABC):
    """How much better each rollout of a step did than others: a pure function of their rewards.

    A variant is a formula, in `compute`; it reads its own settings from `section`.
    """

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    def __call__(self, rollouts: StepRollouts) -> npt.NDArray[np.float32]:
        """float32 [S], of finite rewards. Flat groups get exactly 0: rounding must not make a gradient where nothing
        can be learnt.

        With `normalise_advantages` they are (A - mean) / (std + `advantage_epsilon`) over the step, as in TRL's
        RLOOTrainer.
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
        """The advantages, finite float64 [S]; whatever it gives the rollouts of a flat group."""

    def is_flat(self, group: StepRollouts) -> bool:
        """Whether the rollouts of one group, at least one, have nothing to be learnt from: here decides who drops them
        (`learner.zero_variance`) and who gives them no gradient."""
        return bool(np.ptp(group.rewards) == 0)

    def stays_flat(self, group: StepRollouts) -> bool:
        """Whether that is known before the step: with `kl_in_reward`, the KL will make equal rewards differ."""
        penalised = self.section.kl_in_reward and self.section.kl_coef > 0
        return self.is_flat(group) and (len(group) == 1 or not penalised)


class GroupAdvantage(Advantage):
    """An advantage that looks at one group at a time."""

    def compute(self, rollouts: StepRollouts) -> Floats:
        advantages = np.zeros(len(rollouts))
        for members in rollouts.by_group():
            if len(members) > 1:
                advantages[members] = self.of_group(rollouts.rewards[members])
        return advantages

    @abstractmethod
    def of_group(self, rewards: Floats) -> Floats:
        """The advantages, float64 [G], of a group's rewards, float64 [G], G >= 2."""


def sample_std(values: Floats) -> float:
    """The standard deviation of a sample (divided by n - 1), as `torch.std`; 0 of less than two values."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def standardised(values: Floats, epsilon: float) -> Floats:
    """(x - mean) / (std + epsilon) of at least one value, with the sample's deviation."""
    return np.asarray((values - values.mean()) / (sample_std(values) + epsilon))


# TRL's; no setting there.
_EPSILON = 1e-8


class AsyncGrpo(GroupAdvantage):
    """(r - mean) / (std + 1e-8), as in TRL's AsyncGRPOTrainer: the deviation is the population's (divided by G), so the
    advantages are sqrt(G / (G - 1)) times those of `grpo`, and the least difference of rewards counts in full.

    Choose it to compare with TRL's AsyncGRPOTrainer.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return np.asarray((rewards - rewards.mean()) / (float(rewards.std()) + _EPSILON))


class DrGrpo(GroupAdvantage):
    """r - mean: without the division, groups of little variance count no more than others (arXiv:2503.20783).

    Choose it where many groups are nearly solved or nearly hopeless, whose small deviations would make noise loud, and
    where rewards are on one scale.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return np.asarray(rewards - rewards.mean())


class Batch(DrGrpo):
    """(r - mean of the group) / (std of the step + `advantage_epsilon`): arXiv:2508.08221, TRL's
    `scale_rewards="batch"`.

    The standard deviation is the sample's, over the rewards of all rollouts of the step: groups that
    `learner.zero_variance` keeps out of it do not count.

    Choose it where groups are small, so that a group's own deviation is noise.
    """

    def compute(self, rollouts: StepRollouts) -> Floats:
        return super().compute(rollouts) / (sample_std(rollouts.rewards) + self.section.advantage_epsilon)


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


class Grpo(GroupAdvantage):
    """(r - mean) / (std + `advantage_epsilon`), as in arXiv:2402.03300, section 4.1.2.

    The standard deviation is the sample's (divided by G - 1), as in TRL's GRPOTrainer, which takes `torch.std`.

    Choose it first: groups count alike, whatever the scale of their rewards.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return standardised(rewards, self.section.advantage_epsilon)


class Rloo(GroupAdvantage):
    """REINFORCE leave-one-out (arXiv:2402.14740): r_i - mean of r_j over j != i.

    Choose it for an unbiased baseline, and for rewards whose size means something.
    """

    def of_group(self, rewards: Floats) -> Floats:
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return np.asarray(rewards - others)


ADVANTAGES: dict[str, type[Advantage]] = {
    "grpo": Grpo,
    "async_grpo": AsyncGrpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "batch": Batch,
    "gdpo": Gdpo,
}


def build(section: LearnerSection) -> Advantage:
    """The variant that `learner.advantage` names."""
    return ADVANTAGES[section.advantage](section)
