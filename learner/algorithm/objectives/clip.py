"""PPO's clip, of whatever ratio."""

from __future__ import annotations

import torch

from learner.algorithm.objectives.ratio import RatioObjective, Terms
from learner.algorithm.step_data import Tokens


class ClipObjective(RatioObjective):
    """loss = -min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Clip as in PPO (arXiv:1707.06347, eq. 7), with DAPO's two bounds (arXiv:2503.14476, eq. 10). They leave r unbounded
    where A < 0: `delta` bounds it there (dual clip, arXiv:1912.09729; two-sided clipping, arXiv:2505.07291; TRL's
    `delta`). What is beyond any bound has no gradient.

    Sums: `clip_ratio/low_mean`, `clip_ratio/high_mean`, what is clipped on one side, `clip_ratio/region_mean` on either
    one, as TRL counts it; `clip_ratio/delta_mean`, what is beyond delta.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        lowest, highest, delta = 1 - self.section.clip_low, 1 + self.section.clip_high, self.section.delta
        advantages = tokens.advantages
        most = float("inf") if delta == "none" else float(delta)
        clipped = ratio.clamp(lowest, highest)
        losses = -torch.minimum(ratio.clamp(max=most) * advantages, clipped * advantages)

        ratio, good, bad = ratio.detach(), advantages > 0, advantages < 0
        low, high = (ratio < lowest) & bad, (ratio > highest) & good
        shown = {"low": low, "high": high, "region": low | high, "delta": (ratio > most) & bad}
        return Terms(losses, {f"clip_ratio/{name}_mean": value for name, value in shown.items()})
