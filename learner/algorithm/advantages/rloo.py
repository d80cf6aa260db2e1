"""`advantage = "rloo"`: distance from the mean reward of the others."""

from __future__ import annotations

import numpy as np

from learner.algorithm.advantages.base import GroupAdvantage
from learner.algorithm.rollouts import Floats


class Rloo(GroupAdvantage):
    """REINFORCE leave-one-out (arXiv:2402.14740): r_i - mean of r_j over j != i.

    Choose it for an unbiased baseline, and for rewards whose size means something.
    """

    def of_group(self, rewards: Floats) -> Floats:
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return np.asarray(rewards - others)
