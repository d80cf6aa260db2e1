"""The face of an advantage."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from learner.algorithm.rollouts import Floats, StepRollouts
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
