"""`advantage = "async_grpo"`: as `grpo`, with the deviation of TRL's asynchronous trainer."""

from __future__ import annotations

import numpy as np

from learner.algorithm.advantages.base import GroupAdvantage
from learner.algorithm.rollouts import Floats

# TRL's; no setting there.
_EPSILON = 1e-8


class AsyncGrpo(GroupAdvantage):
    """(r - mean) / (std + 1e-8), as in TRL's AsyncGRPOTrainer: the deviation is the population's (divided by G), so the
    advantages are sqrt(G / (G - 1)) times those of `grpo`, and the least difference of rewards counts in full.

    Choose it to compare with TRL's AsyncGRPOTrainer.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return np.asarray((rewards - rewards.mean()) / (float(rewards.std()) + _EPSILON))
