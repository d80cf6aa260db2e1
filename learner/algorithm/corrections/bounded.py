"""What corrections by the ratio proximal / behaviour have in common: its bounds, and its figures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from learner.algorithm.corrections.base import Corrected, Correction
from learner.algorithm.objectives.base import MAX_LOG_RATIO
from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection


class BoundedRatio(Correction):
    """A correction by r = proximal / behaviour, without a gradient, within `correction_low` and `correction_high`.

    LOW, HIGH: the bounds where the run file sets none. RATIO: how the metrics call r as it is used, and OUTSIDE the
    share of r that were outside of the bounds. Figures: least, mean and greatest r; that share; `correction/ess`, the
    effective sample size of the r that are used, (sum r)^2 / (n sum r^2), from 0 to 1. They count each token once where
    r is a token's, and each rollout once where it is a rollout's (`by_rollout`), in whatever rows its tokens stand.

    An r that is not a number is never outside: the step must end in `DivergedError`, not in a mask.
    """

    LOW: ClassVar[float] = 0.0
    HIGH: ClassVar[float]
    RATIO: ClassVar[str] = "sampling/importance_sampling_ratio"
    OUTSIDE: ClassVar[str]

    def __init__(self, section: LearnerSection) -> None:
        super().__init__(section)
        self.low = self.LOW if section.correction_low is None else section.correction_low
        self.high = self.HIGH if section.correction_high is None else section.correction_high

    def __call__(self, tokens: Tokens) -> Corrected:
        weighted = tokens.weights > 0
        log_ratio = torch.where(weighted, self.log_ratio(tokens), 0.0)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = (ratio < self.low) | (ratio > self.high)
        used = self.used(ratio, outside)

        one = 1 / tokens.lengths if self.by_rollout else torch.ones_like(ratio)
        one = torch.where(weighted, one, 0.0)
        sums = {
            "count": one.sum(),
            "outside": (one * outside).sum(),
            "ratio": (one * used).sum(),
            "ratio_squared": (one * used.square()).sum(),
        }
        nothing = torch.full_like(used, -torch.inf)
        peaks = {
            "highest": torch.where(weighted, used, nothing).amax(),
            "lowest_negated": torch.where(weighted, -used, nothing).amax(),
        }
        return Corrected(self.corrected(tokens, used, outside), sums, peaks)

    @abstractmethod
    def log_ratio(self, tokens: Tokens) -> torch.Tensor:
        """log r of each token, or of its rollout, float32 [N]."""

    @abstractmethod
    def used(self, ratio: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        """r after its bounds, float32 [N]. `outside`: bool [N]."""

    @abstractmethod
    def corrected(self, tokens: Tokens, used: torch.Tensor, outside: torch.Tensor) -> Tokens:
        """What the objective is to see."""

    def figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        squares = sums["count"] * sums["ratio_squared"]
        return {
            f"{self.RATIO}/min": -sums["lowest_negated"],
            f"{self.RATIO}/mean": sums["ratio"] / sums["count"],
            f"{self.RATIO}/max": sums["highest"],
            self.OUTSIDE: sums["outside"] / sums["count"],
            "correction/ess": sums["ratio"] ** 2 / squares if squares else 0.0,
        }


class ImportanceWeight(BoundedRatio):
    """A token's weight, times r; the objective's ratio is then taken against the proximal policy, as p / proximal times
    proximal / behaviour is p / behaviour: nothing is counted twice. r is that of the whole rollout for variants that
    are `by_rollout`, and else the token's."""

    def log_ratio(self, tokens: Tokens) -> torch.Tensor:
        return tokens.proximal_drift if self.by_rollout else tokens.proximal - tokens.behaviour

    def corrected(self, tokens: Tokens, used: torch.Tensor, outside: torch.Tensor) -> Tokens:
        return tokens.but(weights=tokens.weights * used, old=tokens.proximal, old_drift=tokens.proximal_drift)


class TruncatedWeight(ImportanceWeight):
    """Weights within the bounds: r above or below counts as the bound."""

    OUTSIDE: ClassVar[str] = "correction/truncated"

    def used(self, ratio: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(self.low, self.high)


class MaskedWeight(ImportanceWeight):
    """No weight where r is outside of the bounds."""

    OUTSIDE: ClassVar[str] = "correction/masked"

    def used(self, ratio: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        return torch.where(outside, 0.0, ratio)
