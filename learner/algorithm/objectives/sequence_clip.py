"""`objective = "sequence_clip"`: PPO's clip of the ratio of a whole rollout."""

from __future__ import annotations

from dataclasses import replace

import torch

from learner.algorithm.objectives.clip import ClipObjective
from learner.algorithm.objectives.ratio import Terms, with_own_gradient
from learner.algorithm.step_data import Tokens


class SequenceClip(ClipObjective):
    """PPO's clip of r = p / p_old of the whole rollout, exp(sum of its tokens' log-ratios), as in TRL's RLOOTrainer.

    The loss L of a rollout of n tokens is -min(r A, clip(r) A), and its derivative by each log-prob is that of r alone,
    -r A where nothing is clipped. So a token's loss is L / n with the gradient of L: with `normaliser = "rollouts"`
    these add up to the mean of L over the rollouts, which is TRL's.

    Choose it with `rloo`, and for short answers: the ratio of a whole rollout leaves any bound soon where it is long.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return with_own_gradient(tokens, tokens.rollout_log_ratio())

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        terms = super().terms(tokens, ratio)
        whole = terms.losses.detach()
        return replace(terms, losses=whole / tokens.lengths + (terms.losses - whole))
