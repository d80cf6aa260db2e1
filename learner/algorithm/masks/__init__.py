"""Masks, one file each: tokens that an objective does not see. Any of them may be set beside any objective and
correction."""

from learner.algorithm.masks.base import Mask
from learner.algorithm.masks.off_policy import OffPolicy
from learner.algorithm.masks.top_entropy import TopEntropy
from protocol.config import LearnerSection

MASKS: dict[str, type[Mask]] = {
    "off_policy": OffPolicy,
    "low_entropy": TopEntropy,
}


def build(section: LearnerSection) -> dict[str, Mask]:
    """Those that the run file sets, by what they mask."""
    return {name: mask(section) for name, mask in MASKS.items() if mask.is_set(section)}
