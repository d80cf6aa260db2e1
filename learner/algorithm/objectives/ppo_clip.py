"""`objective = "ppo_clip"`: PPO's clip, against the policy that sampled or the one that a correction names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from learner.algorithm.objectives.base import MAX_LOG_RATIO, Objective, TokenLosses
from learner.algorithm.tokens import Tokens


class PpoClip(Objective):
    """loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_old, for each token.

    Clip as in PPO (arXiv:1707.06347, eq. 7), with DAPO's two bounds (arXiv:2503.14476, eq. 10). Sums: `ratio`,
    `ratio_squared`; `clip_ratio/low_mean`, `clip_ratio/high_mean`, tokens whose gradient the clip takes away; `kl`, the
    k3 estimate of KL(old || policy), r - 1 - log r (joschu.net/blog/kl-approx.html).
    """

    def __call__(self, tokens: Tokens) -> TokenLosses:
        lowest, highest = 1 - self.section.clip_low, 1 + self.section.clip_high
        weighted = tokens.weights > 0
        log_ratio = tokens.log_ratio().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(lowest, highest)
        losses = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages) * tokens.weights

        log_ratio, ratio = log_ratio.detach(), ratio.detach()
        sums = {
            "ratio": torch.where(weighted, ratio, 0.0).sum(),
            "ratio_squared": torch.where(weighted, ratio.square(), 0.0).sum(),
            "clip_ratio/low_mean": (weighted & (ratio < lowest) & (tokens.advantages < 0)).sum(),
            "clip_ratio/high_mean": (weighted & (ratio > highest) & (tokens.advantages > 0)).sum(),
            "kl": (ratio - 1 - log_ratio).sum(),
        }
        return TokenLosses(losses, sums)

    def figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Means, and in place of `ratio_squared` the effective sample size of the ratios, from 0 to 1:
        `ess` = (sum r)^2 / (n sum r^2). `clip_ratio/region_mean`: share of tokens clipped on either side."""
        means = super().figures(sums, tokens)
        del means["ratio_squared"]
        region = means["clip_ratio/low_mean"] + means["clip_ratio/high_mean"]
        ess = sums["ratio"] ** 2 / (tokens * sums["ratio_squared"])
        return {**means, "clip_ratio/region_mean": region, "ess": ess}
