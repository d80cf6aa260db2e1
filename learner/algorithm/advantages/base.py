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
        """float32 [S], of finite rewards. Groups of equal rewards, and lone rollouts, get exactly 0: rounding must not
        make a gradient where nothing can be learnt."""
        advantages = self.compute(rollouts)
        for members in rollouts.by_group():
            if self.is_flat(rollouts.rewards[members]):
                advantages[members] = 0.0
        return advantages.astype(np.float32)

    @abstractmethod
    def compute(self, rollouts: StepRollouts) -> Floats:
        """The advantages, finite float64 [S]; whatever it gives the rollouts of a flat group."""

    def is_flat(self, rewards: Floats) -> bool:
        """Whether a group of these rewards, float64 [G], G >= 1, has nothing to be learnt from."""
        return bool(np.ptp(rewards) == 0)

    def stays_flat(self, rewards: Floats) -> bool:
        """Whether that is known before the step: with `kl_in_reward`, the KL will make equal rewards differ."""
        penalised = self.section.kl_in_reward and self.section.kl_coef > 0
        return self.is_flat(rewards) and (len(rewards) == 1 or not penalised)


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
