"""`advantage = "grpo"`: distance from the group's mean reward, in standard deviations."""

from __future__ import annotations

from learner.algorithm.advantages.base import GroupAdvantage, standardised
from learner.algorithm.rollouts import Floats


class Grpo(GroupAdvantage):
    """(r - mean) / (std + `advantage_epsilon`), as in arXiv:2402.03300, section 4.1.2.

    The standard deviation is the sample's (divided by G - 1), as in TRL's GRPOTrainer, which takes `torch.std`.

    Choose it first: groups count alike, whatever the scale of their rewards.
    """

    def of_group(self, rewards: Floats) -> Floats:
        return standardised(rewards, self.section.advantage_epsilon)
