"""Advantages, one file a variant: how the rewards of a step say which of its rollouts to reinforce."""

from learner.algorithm.advantages.async_grpo import AsyncGrpo
from learner.algorithm.advantages.base import Advantage
from learner.algorithm.advantages.batch import Batch
from learner.algorithm.advantages.dr_grpo import DrGrpo
from learner.algorithm.advantages.gdpo import Gdpo
from learner.algorithm.advantages.grpo import Grpo
from learner.algorithm.advantages.rloo import Rloo
from protocol.config import LearnerSection

ADVANTAGES: dict[str, type[Advantage]] = {
    "grpo": Grpo,
    "async_grpo": AsyncGrpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "batch": Batch,
    "gdpo": Gdpo,
}


def build(section: LearnerSection) -> Advantage:
    """The variant that `learner.advantage` names."""
    return ADVANTAGES[section.advantage](section)
