"""`objective = "dppo"`: the policy gradient of tokens whose distribution did not move too far."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.ratio import RatioObjective, Terms
from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection

# `dppo_threshold = "auto"`: what the authors ran each divergence with (verl, examples/dppo_trainer).
THRESHOLDS = {"tv": 0.15, "kl": 0.05}


class Dppo(RatioObjective):
    """loss = -M sg(min(r, dppo_ratio_max)) A log p: the gradient of -M r A (arXiv:2602.04879, eq. 11) up to the bound,
    which is that of the authors' code (verl, `dppo_tv` and `dppo_kl`).

    M = 0 where the token moved away, r > 1 for A > 0 or r < 1 for A < 0, and D > `dppo_threshold` (eq. 12). D is the
    divergence of two outcomes, this token or any other (eq. 13 and 14): |p - p_old| for "tv",
    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) for "kl". The ratio alone would stop rare tokens
    early and common ones late.

    Sums: `clip_ratio/*`, tokens that M takes away, by side.

    Choose it for large vocabularies, where ratios of rare tokens say little about how far the policy moved.
    """

    def __init__(self, section: LearnerSection) -> None:
        super().__init__(section)
        self._divergence = _total_variation if section.dppo_divergence == "tv" else _kl
        auto = THRESHOLDS[section.dppo_divergence]
        self._threshold = auto if section.dppo_threshold == "auto" else section.dppo_threshold

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        ratio, advantages = ratio.detach(), tokens.advantages
        far = self._divergence(tokens.logprobs.detach(), tokens.old) > self._threshold
        low, high = far & (ratio < 1) & (advantages < 0), far & (ratio > 1) & (advantages > 0)
        away = low | high
        kept = torch.where(away, 0.0, ratio.clamp(max=self.section.dppo_ratio_max))
        shown = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": away}
        return Terms(-kept * advantages * tokens.logprobs, shown)


def _total_variation(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (logprobs.exp() - old.exp()).abs()


def _kl(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """KL(old || policy) in nats; 1 - p as -expm1(log p), as p near 1 would lose its digits."""
    others, old_others = (-torch.expm1(values).clamp(max=-1e-12) for values in (logprobs, old))
    return old.exp() * (old - logprobs) + old_others * (old_others / others).log()
