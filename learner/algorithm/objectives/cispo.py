"""`objective = "cispo"`: the policy gradient, weighted by a ratio that is cut off."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.ratio import RatioObjective, Terms
from learner.algorithm.step_data import Tokens


class Cispo(RatioObjective):
    """loss = -sg(min(r, 1 + clip_high)) A log p, where sg stops the gradient (arXiv:2506.13585, eq. 4 and 5; as there,
    without a lower bound). No token loses its gradient, however far it moved.

    TRL's `epsilon_high` is the bound itself: its 5.0 (ScaleRL, arXiv:2510.13786) is `clip_high = 4.0`. Sum:
    `cispo_clip_ratio`, as TRL counts it: good tokens whose ratio is cut off.

    Choose it where rare tokens matter, such as those that turn an argument, which a clip would silence; and for stale
    data, as all of it teaches.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        ratio, highest = ratio.detach(), 1 + self.section.clip_high
        losses = -ratio.clamp(max=highest) * tokens.advantages * tokens.logprobs
        return Terms(losses, {"cispo_clip_ratio": (ratio > highest) & (tokens.advantages > 0)})
