"""`correction = "geometric_mask"`: rollouts are left out by the geometric mean of their tokens' ratios."""

from __future__ import annotations

from typing import ClassVar

import torch

from learner.algorithm.corrections.bounded import BoundedRatio
from learner.algorithm.step_data import Tokens


class GeometricMask(BoundedRatio):
    """No weight for rollouts whose exp(mean of log proximal - log behaviour), over their tokens that train, is outside
    of [`correction_low`, `correction_high`]; nothing else is changed: the objective's ratio stays one to the sampler.

    Geometric sequence masking (richardli.xyz/post/rl-collapse-part3), with the bounds of SkyRL's examples, 0.99 and
    1.01. They are narrow: where `correction/masked` is high, widen them.

    Choose it for long rollouts, as its mean does not grow with their length.
    """

    by_rollout: ClassVar[bool] = True
    LOW: ClassVar[float] = 0.99
    HIGH: ClassVar[float] = 1.01
    RATIO: ClassVar[str] = "correction/geometric_ratio"
    OUTSIDE: ClassVar[str] = "correction/masked"

    def log_ratio(self, tokens: Tokens) -> torch.Tensor:
        return tokens.proximal_drift / tokens.lengths

    def used(self, ratio: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        return ratio

    def corrected(self, tokens: Tokens, used: torch.Tensor, outside: torch.Tensor) -> Tokens:
        return tokens.masked(~outside)
