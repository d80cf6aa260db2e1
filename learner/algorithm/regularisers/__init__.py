"""Regularisers, one file each: what a loss holds beside its objective, so that the policy stays near a reference or
keeps its entropy."""

from learner.algorithm.regularisers.base import Regulariser
from learner.algorithm.regularisers.entropy import EntropyBonus
from learner.algorithm.regularisers.kl_in_loss import KlInLoss
from learner.algorithm.regularisers.kl_in_reward import KlInReward
from protocol.config import LearnerSection


def build(section: LearnerSection) -> list[Regulariser]:
    """Those whose coefficient is above 0."""
    found: list[Regulariser] = []
    if section.kl_coef:
        found.append(KlInReward(section) if section.kl_in_reward else KlInLoss(section))
    if section.entropy_coef:
        found.append(EntropyBonus(section))
    return found
