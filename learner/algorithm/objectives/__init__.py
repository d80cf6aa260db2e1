"""Objectives, one file a variant: the loss of each sampled token, from its log-probs and its advantage."""

from learner.algorithm.objectives.base import Objective
from learner.algorithm.objectives.cispo import Cispo
from learner.algorithm.objectives.dppo import Dppo
from learner.algorithm.objectives.gspo import Gspo
from learner.algorithm.objectives.importance import Importance
from learner.algorithm.objectives.ppo_clip import PpoClip
from learner.algorithm.objectives.reinforce import Reinforce
from learner.algorithm.objectives.sapo import Sapo
from learner.algorithm.objectives.sequence_clip import SequenceClip
from learner.algorithm.objectives.vespo import Vespo
from protocol.config import LearnerSection

OBJECTIVES: dict[str, type[Objective]] = {
    "ppo_clip": PpoClip,
    "gspo": Gspo,
    "sequence_clip": SequenceClip,
    "cispo": Cispo,
    "dppo": Dppo,
    "sapo": Sapo,
    "vespo": Vespo,
    "importance": Importance,
    "reinforce": Reinforce,
}


def build(section: LearnerSection) -> Objective:
    """The variant that `learner.objective` names."""
    return OBJECTIVES[section.objective](section)
