"""Objectives, one file a variant: the loss of each sampled token, from its log-probs and its advantage."""

from learner.algorithm.objectives.base import Objective
from learner.algorithm.objectives.ppo_clip import PpoClip
from protocol.config import LearnerSection

OBJECTIVES: dict[str, type[Objective]] = {
    "ppo_clip": PpoClip,
}


def build(section: LearnerSection) -> Objective:
    """The variant that `learner.objective` names."""
    return OBJECTIVES[section.objective](section)
