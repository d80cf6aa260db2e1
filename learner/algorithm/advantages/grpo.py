"""`advantage = "grpo"`: distance from the group's mean reward, in standard deviations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from learner.algorithm.advantages.base import Advantage


class Grpo(Advantage):
    """(r - mean) / (std + `advantage_epsilon`), as in arXiv:2402.03300, section 4.1.2.

    The standard deviation is the sample's (divided by G - 1), as in TRL, which takes `torch.std`.
    """

    def compute(self, rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        scale = float(rewards.std(ddof=1)) + self.section.advantage_epsilon
        return np.asarray((rewards - rewards.mean()) / scale)
