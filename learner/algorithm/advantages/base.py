"""The face of an advantage."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from protocol.config import LearnerSection


class Advantage(ABC):
    """How much better each rollout of a group did than the others: a pure function of the group's rewards.

    A variant is a formula, in `compute`; it reads its own settings from `section`.
    """

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    def __call__(self, rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """rewards: finite float64 [G], G >= 1; returns float32 [G].

        Equal rewards, and a lone one, give exactly 0: rounding must not make a gradient where nothing can be learnt.
        """
        if np.ptp(rewards) == 0:
            return np.zeros(len(rewards), dtype=np.float32)
        return self.compute(rewards).astype(np.float32)

    @abstractmethod
    def compute(self, rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The advantages, float64 [G], of rewards that differ, float64 [G], so that G >= 2."""
