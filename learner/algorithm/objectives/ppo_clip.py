"""GRPO with PPO's clip against the sampler's log-probs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.algorithm.objectives.base import TokenLosses, Tokens

# exp() of more overflows a float32 sum of squares; no useful ratio is near it.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Grpo:
    """loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_behaviour, for each token.

    Clip as in PPO (arXiv:1707.06347, eq. 7), with DAPO's two bounds (arXiv:2503.14476, eq. 10). The sums, over
    tokens with weight: `ratio`, `ratio_squared`; `clipped_low`, `clipped_high`, tokens that the clip takes the
    gradient from; `kl`, the k3 estimate of KL(behaviour || policy), r - 1 - log r (joschu.net/blog/kl-approx.html).
    """

    clip_low: float
    clip_high: float

    def __call__(self, tokens: Tokens) -> TokenLosses:
        weighted = tokens.weights > 0
        # Without weight the ratio is 1: a wild one would turn 0 * inf into NaN.
        log_ratio = torch.where(weighted, tokens.logprobs - tokens.behaviour, 0.0)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages) * tokens.weights
        return TokenLosses(losses, self._sums(log_ratio.detach(), tokens, weighted))

    def _sums(self, log_ratio: torch.Tensor, tokens: Tokens, weighted: torch.Tensor) -> dict[str, torch.Tensor]:
        ratio = log_ratio.exp()
        low = weighted & (ratio < 1 - self.clip_low) & (tokens.advantages < 0)
        high = weighted & (ratio > 1 + self.clip_high) & (tokens.advantages > 0)
        return {
            "ratio": ratio[weighted].sum(),
            "ratio_squared": ratio[weighted].square().sum(),
            "clipped_low": low.sum(),
            "clipped_high": high.sum(),
            "kl": (ratio - 1 - log_ratio).sum(),
        }
