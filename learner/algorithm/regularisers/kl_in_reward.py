"""`kl_in_reward`: the KL to a reference model is taken from the rewards."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.base import TokenLosses
from learner.algorithm.regularisers.base import Regulariser
from learner.algorithm.rollouts import Floats
from learner.algorithm.step_data import Tokens


class KlInReward(Regulariser):
    """reward - kl_coef * sum of log p_behaviour - log p_reference over the rollout's tokens (RLOO, arXiv:2402.14740,
    section 2).

    The estimate is k1 of joschu.net/blog/kl-approx.html, under the policy that sampled, as in TRL's RLOOTrainer; it is
    taken off before the advantage. Tokens of tools and environments never count, nor do those that are masked: these
    stand before the ones that train, which cannot have caused them, or in a rollout that does not train at all.

    Sums: `kl_reference`, of the estimates. There is no term in the loss.

    Choose it with `rloo`, as its paper has it.
    """

    needs_reference = True
    in_reward = True

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.reference is None:
            raise ValueError("tokens.reference is None: learner.kl_coef needs a reference model")
        estimate = torch.where(tokens.weights > 0, tokens.behaviour - tokens.reference, 0.0)
        return TokenLosses(torch.zeros_like(estimate), {"kl_reference": estimate.sum()})

    def penalties(self, reference_drift: Floats) -> Floats:
        return -self.section.kl_coef * reference_drift
