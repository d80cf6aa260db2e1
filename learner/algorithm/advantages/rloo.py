"""`advantage = "rloo"`: distance from the mean reward of the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.algorithm.advantages.base import Advantage


class Rloo(Advantage):
    """REINFORCE leave-one-out (arXiv:2402.14740): r_i - mean of r_j over j != i."""

    def compute(self, rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return np.asarray(rewards - others)
