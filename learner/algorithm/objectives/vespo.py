"""`objective = "vespo"`: the policy gradient, weighted by a smooth kernel of a whole rollout's ratio."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.ratio import RatioObjective, Terms, bounded
from learner.algorithm.step_data import Tokens


class Vespo(RatioObjective):
    """loss = -phi(w) A log p, phi(w) = w^k exp(lambda (1 - w)) without a gradient, w = p / p_old of the whole rollout
    (arXiv:2602.10693; as TRL 1.16's `get_gamma_weights`).

    k and lambda are `vespo_k_pos`, `vespo_lambda_pos` where A >= 0, `vespo_k_neg`, `vespo_lambda_neg` elsewhere.
    phi(1) = 1, and phi falls on both sides of k / lambda. Sum: `vespo/phi_seq_mean`, phi.

    Choose it for stale data and rollouts whose ratios differ much, without a bound to be tuned.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return bounded(tokens.rollout_log_ratio()).exp()

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        section, log_ratio = self.section, ratio.log()
        powers = (section.vespo_k_pos, section.vespo_lambda_pos), (section.vespo_k_neg, section.vespo_lambda_neg)
        good, bad = ((k * log_ratio + fall * (1 - ratio)).exp() for k, fall in powers)
        phi = torch.where(tokens.advantages >= 0, good, bad)
        return Terms(-phi * tokens.advantages * tokens.logprobs, {"vespo/phi_seq_mean": phi})
