"""Corrections, one file a variant: what is done about tokens that an older version of the policy sampled."""

from learner.algorithm.corrections.base import Correction
from learner.algorithm.corrections.decoupled import Decoupled
from learner.algorithm.corrections.geometric_mask import GeometricMask
from learner.algorithm.corrections.none import NoCorrection
from learner.algorithm.corrections.sequence_mask import SequenceMask
from learner.algorithm.corrections.sequence_truncate import SequenceTruncate
from learner.algorithm.corrections.token_mask import TokenMask
from learner.algorithm.corrections.token_truncate import TokenTruncate
from protocol.config import LearnerSection

CORRECTIONS: dict[str, type[Correction]] = {
    "none": NoCorrection,
    "token_truncate": TokenTruncate,
    "token_mask": TokenMask,
    "sequence_truncate": SequenceTruncate,
    "sequence_mask": SequenceMask,
    "geometric_mask": GeometricMask,
    "decoupled": Decoupled,
}


def build(section: LearnerSection) -> Correction:
    """The variant that `learner.correction` names."""
    return CORRECTIONS[section.correction](section)
