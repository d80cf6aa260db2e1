"""Advantages, one file a variant: how the rewards of a step say which of its rollouts to reinforce."""

from learner.algorithm.advantages.base import Advantage
from learner.algorithm.advantages.dr_grpo import DrGrpo
from learner.algorithm.advantages.grpo import Grpo
from learner.algorithm.advantages.rloo import Rloo
from protocol.config import LearnerSection

ADVANTAGES: dict[str, type[Advantage]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
}


def build(section: LearnerSection) -> Advantage:
    """The variant that `learner.advantage` names."""
    return ADVANTAGES[section.advantage](section)
