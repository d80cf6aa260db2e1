"""`off_policy_mask_threshold`: bad rollouts that the policy has moved away from."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from learner.algorithm.masks.base import Mask
from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection


class OffPolicy(Mask):
    """Leaves out rollouts of negative advantage whose mean of log behaviour - log policy, over their tokens that train,
    is above the threshold: off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, eq. 9), as TRL's
    `off_policy_mask_threshold`. A mean that is not a number leaves nothing out, so that the step ends in an error.

    Choose it for stale data: bad rollouts that the policy would not make any more are the first to spoil a step.
    """

    by_rollout: ClassVar[bool] = True

    def __init__(self, section: LearnerSection) -> None:
        super().__init__(section)
        self._threshold = section.off_policy_mask_threshold or math.inf

    @staticmethod
    def is_set(section: LearnerSection) -> bool:
        return section.off_policy_mask_threshold is not None

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        far = -tokens.drift / tokens.lengths > self._threshold
        return ~(far & (tokens.advantages < 0))
