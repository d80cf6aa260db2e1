"""`objective = "importance"`: importance sampling, with nothing that bounds the ratio."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.ratio import RatioObjective, Terms
from learner.algorithm.step_data import Tokens


class Importance(RatioObjective):
    """loss = -r A, r = p / p_old of each token: unbiased for one token, and of a variance without bound.

    Only log r is bounded, by 20 on either side, so that float32 holds it: what is beyond has no gradient.

    Choose it to measure what a bound is worth, not to train.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        return Terms(-ratio * tokens.advantages)
