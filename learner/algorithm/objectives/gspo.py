"""`objective = "gspo"`: PPO's clip of the mean ratio of a whole rollout."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.clip import ClipObjective
from learner.algorithm.objectives.ratio import with_own_gradient
from learner.algorithm.step_data import Tokens


class Gspo(ClipObjective):
    """PPO's clip of s = exp(mean of log p / p_old over the rollout), so that a rollout is clipped whole
    (arXiv:2507.18071, eq. 5 and 7).

    Written as GSPO-token (section 4.3), which has the same loss and gradient where a rollout's tokens have one
    advantage: with `normaliser = "sequences"` it is the paper's. TRL: `importance_sampling_level = "sequence"`.

    Choose it for mixtures of experts and for long answers, whose single tokens' ratios are noise.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return with_own_gradient(tokens, tokens.rollout_log_ratio() / tokens.lengths)
