"""`entropy_coef` > 0: a bonus for entropy."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.base import TokenLosses
from learner.algorithm.regularisers.base import Regulariser
from learner.algorithm.step_data import Tokens


class EntropyBonus(Regulariser):
    """loss = -entropy_coef * H for each token, H in nats, of the distribution that the sampler draws from.

    A mean over the step's tokens, whatever the normaliser is, as in TRL's GRPOTrainer: so a coefficient means the same
    beside each of them. The bonus of PPO (arXiv:1707.06347, eq. 9), with its gradient through all of the distribution.

    Choose it, at 0.001 or so, where `entropy` falls to 0 before the reward has risen.
    """

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.entropy_weights is None:
            raise ValueError("tokens.entropy_weights is None: learner.entropy_coef needs them")
        entropy = torch.where(tokens.weights > 0, tokens.entropy, 0.0)
        return TokenLosses(-self.section.entropy_coef * entropy * tokens.entropy_weights, {})
