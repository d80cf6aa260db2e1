"""`advantage = "batch"`: distance from the group's mean reward, in standard deviations of the step's rewards."""

from __future__ import annotations

from learner.algorithm.advantages.base import sample_std
from learner.algorithm.advantages.dr_grpo import DrGrpo
from learner.algorithm.rollouts import Floats, StepRollouts


class Batch(DrGrpo):
    """(r - mean of the group) / (std of the step + `advantage_epsilon`): arXiv:2508.08221, TRL's
    `scale_rewards="batch"`.

    The standard deviation is the sample's, over the rewards of all rollouts of the step: groups that
    `learner.zero_variance` keeps out of it do not count.

    Choose it where groups are small, so that a group's own deviation is noise.
    """

    def compute(self, rollouts: StepRollouts) -> Floats:
        return super().compute(rollouts) / (sample_std(rollouts.rewards) + self.section.advantage_epsilon)
