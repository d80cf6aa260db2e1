"""`objective = "sapo"`: a smooth gate in the place of the clip."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.ratio import RatioObjective, Terms
from learner.algorithm.step_data import Tokens


class Sapo(RatioObjective):
    """loss = -sigmoid(tau (r - 1)) (4 / tau) A, tau = `sapo_temperature_pos` where A > 0, `sapo_temperature_neg`
    elsewhere (arXiv:2511.20347).

    Its derivative by log p is -4 s (1 - s) r A, s the sigmoid: -A at r = 1, and less the farther r is from there.

    Choose it where a clip takes many tokens away (`clip_ratio/region_mean` above 0.1).
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        taus = self.section.sapo_temperature_pos, self.section.sapo_temperature_neg
        good, bad = (torch.sigmoid(tau * (ratio - 1)) * (4 / tau) for tau in taus)
        return Terms(-torch.where(tokens.advantages > 0, good, bad) * tokens.advantages)
