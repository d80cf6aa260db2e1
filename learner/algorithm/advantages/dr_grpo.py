"""`advantage = "dr_grpo"`: distance from the group's mean reward."""

from __future__ import annotations

import numpy as np

from learner.algorithm.advantages.base import GroupAdvantage
from learner.algorithm.rollouts import Floats


class DrGrpo(GroupAdvantage):
    """r - mean: without the division, groups of little variance count no more than others (arXiv:2503.20783).

    Choose it where many groups are nearly solved or nearly hopeless, whose small deviations would make noise loud, and
    where rewards are on one scale.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return np.asarray(rewards - rewards.mean())
