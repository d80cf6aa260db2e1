"""Corrections, one file a variant: what is done about tokens that an older version of the policy sampled."""

from learner.algorithm.corrections.base import Correction
from learner.algorithm.corrections.none import NoCorrection
from protocol.config import LearnerSection

CORRECTIONS: dict[str, type[Correction]] = {
    "none": NoCorrection,
}


def build(section: LearnerSection) -> Correction:
    """The variant that `learner.correction` names."""
    return CORRECTIONS[section.correction](section)
