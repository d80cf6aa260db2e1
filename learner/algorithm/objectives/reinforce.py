"""`objective = "reinforce"`: the policy gradient, as if the policy itself had sampled."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.ratio import RatioObjective, Terms
from learner.algorithm.step_data import Tokens


class Reinforce(RatioObjective):
    """loss = -A log p (Williams 1992, doi:10.1007/BF00992696), without a ratio: with a correction that weighs tokens
    this is truncated importance sampling (`token_truncate`) or IcePop (`token_mask`). The ratio is shown all the same.

    Choose it beside a correction, or where data is never stale.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        return Terms(-tokens.advantages * tokens.logprobs)
