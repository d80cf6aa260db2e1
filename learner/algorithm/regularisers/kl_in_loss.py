"""`kl_coef` > 0: the KL to a reference model in the loss."""

from __future__ import annotations

import math

import torch

from learner.algorithm.objectives.base import MAX_LOG_RATIO, TokenLosses
from learner.algorithm.regularisers.base import Regulariser
from learner.algorithm.step_data import Tokens


class KlInLoss(Regulariser):
    """loss = kl_coef * k3 for each token, k3 = exp(d) - d - 1, d = log p_reference - log p.

    k3 estimates KL(policy || reference) and is never negative (joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300,
    eq. 4). With `kl_bias_correction`, times p / p_behaviour with its gradient: then the gradient is that of the KL
    although another policy sampled the token (DeepSeek-V3.2, arXiv:2512.02556, eq. 7); the ratio counts as at most
    `delta`, or a single token that the policy has come to like would be all of a step's gradient. As in TRL's
    GRPOTrainer, neither importance weights nor masks touch it.

    Sums: `kl_reference`, of the estimates as the loss has them.

    Choose it where the policy must keep what it could before, such as style or other tasks; tasks with rewards that can
    be checked seldom need it.
    """

    needs_reference = True

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.reference is None:
            raise ValueError("tokens.reference is None: learner.kl_coef needs a reference model")
        weighted = tokens.weights > 0
        distance = torch.where(weighted, tokens.reference - tokens.logprobs, 0.0)
        if self.section.kl_bias_correction:
            estimate = self._corrected(tokens, distance)
        else:
            estimate = _exp(distance) - distance - 1
        losses = self.section.kl_coef * estimate * tokens.weights
        return TokenLosses(losses, {"kl_reference": estimate.detach().sum()})

    def _corrected(self, tokens: Tokens, distance: torch.Tensor) -> torch.Tensor:
        """r * (exp(d) - d - 1), r = p / p_behaviour, whose gradient is -r * d: the term r * exp(d), p_reference /
        p_behaviour, has none, and is written apart as r and exp(d) may be as small and as large as floats get."""
        weighted = tokens.weights > 0
        highest = MAX_LOG_RATIO if self.section.delta == "none" else math.log(self.section.delta)
        log_ratio = torch.where(weighted, tokens.logprobs - tokens.behaviour, 0.0).detach()
        bounded = log_ratio.clamp(-MAX_LOG_RATIO, highest)
        ratio, fixed = bounded.exp(), distance.detach()
        value = _exp(fixed + bounded) - ratio * (1 + fixed)
        return value + ratio * fixed * (distance - fixed)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x), beyond MAX_LOG_RATIO with the slope that it has there: a wild token still moves towards the reference,
    and nothing overflows."""
    bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
    return bounded.exp() * (1 + log_ratio - bounded)
