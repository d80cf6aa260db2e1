"""Corrections of tokens that an older version of the policy sampled.

A correction is a pure function of tokens, applied before the objective. Most weigh or mask by the ratio of the proximal
policy, which lies between sampler and learner, to the policy that sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from slipstream.learner.algorithm.objectives import MAX_LOG_RATIO
from slipstream.learner.algorithm.step_data import Tokens
from slipstream.protocol.config import LearnerSection


@dataclass(frozen=True)
class Corrected:
    """A row's tokens after a correction.

    Attributes:
        tokens: With the weights, the `old` and the `old_drift` that the objective uses.
        sums: Sums for metrics, as in `TokenLosses`, over the tokens that had weight before.
        peaks: Greatest values for metrics, as in `TokenLosses`.
    """

    tokens: Tokens
    sums: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)


class Correction(ABC):
    """The interface of a correction. A variant reads its own settings from `section`.

    Attributes:
        by_rollout: Whether it reads what `Tokens` has of whole rollouts.
    """

    by_rollout: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Corrected:
        """Correct the tokens of a row."""

    def metrics(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Make the metrics of `metrics.jsonl`.

        Args:
            sums: The step's sums and peaks.
            tokens: Number of the step's tokens that had weight before.
        """
        return {name: value / tokens for name, value in sums.items()}


class NoCorrection(Correction):
    """Corrects nothing: the objective itself uses p / p_behaviour.

    Choose it for staleness of 0 or 1, and with objectives that bound their ratio.
    """

    def __call__(self, tokens: Tokens) -> Corrected:
        return Corrected(tokens, {})


class BoundedRatio(Correction):
    """A correction by r = proximal / behaviour, without a gradient, within `correction_low` and `correction_high`.

    Its metrics are the least, mean and greatest r that is used; the share of r outside the bounds; and
    `correction/ess`, the effective sample size of the r that are used, (sum r)^2 / (n sum r^2), from 0 to 1. They count
    each token once where r is a token's. Where r is a rollout's (`by_rollout`) they count each rollout once, in
    whatever rows its tokens stand.

    An r that is not a number is never outside: the step must end in `DivergedError`, not in a mask.

    Attributes:
        LOW: The lower bound where the run file sets none.
        HIGH: The upper bound where the run file sets none.
        RATIO: Prefix of the metrics of r.
        OUTSIDE: Name of the metric for the share outside the bounds.
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

        share = 1 / tokens.lengths if self.by_rollout else torch.ones_like(ratio)
        share = torch.where(weighted, share, 0.0)
        sums = {
            "count": share.sum(),
            "outside": (share * outside).sum(),
            "ratio": (share * used).sum(),
            "ratio_squared": (share * used.square()).sum(),
        }
        nothing = torch.full_like(used, -torch.inf)
        peaks = {
            "highest": torch.where(weighted, used, nothing).amax(),
            "lowest_negated": torch.where(weighted, -used, nothing).amax(),
        }
        return Corrected(self.corrected(tokens, used, outside), sums, peaks)

    @abstractmethod
    def log_ratio(self, tokens: Tokens) -> torch.Tensor:
        """Return log r of each token, or of its rollout, float32 [N]."""

    @abstractmethod
    def used(self, ratio: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        """Apply the bounds to r.

        Args:
            ratio: float32 [N].
            outside: bool [N], whether r is outside the bounds.

        Returns:
            float32 [N].
        """

    @abstractmethod
    def corrected(self, tokens: Tokens, used: torch.Tensor, outside: torch.Tensor) -> Tokens:
        """Return the tokens that the objective sees."""

    def metrics(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        squares = sums["count"] * sums["ratio_squared"]
        return {
            f"{self.RATIO}/min": -sums["lowest_negated"],
            f"{self.RATIO}/mean": sums["ratio"] / sums["count"],
            f"{self.RATIO}/max": sums["highest"],
            self.OUTSIDE: sums["outside"] / sums["count"],
            "correction/ess": sums["ratio"] ** 2 / squares if squares else 0.0,
        }


class ImportanceWeight(BoundedRatio):
    """Multiplies a token's weight by r = proximal / behaviour, and takes the objective's ratio against the proximal
    policy instead of the sampler. r is the whole rollout's for variants that are `by_rollout`, else the token's.
    """

    def log_ratio(self, tokens: Tokens) -> torch.Tensor:
        return tokens.proximal_drift if self.by_rollout else tokens.proximal - tokens.behaviour

    def corrected(self, tokens: Tokens, used: torch.Tensor, outside: torch.Tensor) -> Tokens:
        return tokens.but(weights=tokens.weights * used, old=tokens.proximal, old_drift=tokens.proximal_drift)


class TruncatedWeight(ImportanceWeight):
    """Replaces an r outside the bounds by the bound."""

    OUTSIDE: ClassVar[str] = "correction/truncated"

    def used(self, ratio: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(self.low, self.high)


class MaskedWeight(ImportanceWeight):
    """Gives no weight to a token whose r is outside the bounds."""

    OUTSIDE: ClassVar[str] = "correction/masked"

    def used(self, ratio: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        return torch.where(outside, 0.0, ratio)


class TokenTruncate(TruncatedWeight):
    """weight = clip(r, `correction_low`, `correction_high`) of each token: truncated importance sampling, by default
    with an upper bound of 2 (Yao et al., fengyao.notion.site/off-policy-rl).

    Choose it with `reinforce` for stale data (preset `tis`): every token teaches, none decides.
    """

    HIGH: ClassVar[float] = 2.0


class TokenMask(MaskedWeight):
    """weight = r of each token within [`correction_low`, `correction_high`], and 0 outside: IcePop (Ring-1T,
    arXiv:2510.18855), by default with its bounds 0.5 and 5.

    Choose it with `reinforce` where sampler and learner disagree on single tokens, as with mixtures of experts (preset
    `icepop`).
    """

    LOW: ClassVar[float] = 0.5
    HIGH: ClassVar[float] = 5.0


class SequenceTruncate(TruncatedWeight):
    """weight = clip(r, `correction_low`, `correction_high`), where r = exp(sum of log proximal - log behaviour) over
    the rollout's tokens that train; by default with TRL's upper bound, 3 (richardli.xyz/post/rl-collapse-part2,
    analysis 1).

    Choose it for short rollouts: a weight of the whole rollout is less biased than weights of tokens, but its variance
    grows with the length.
    """

    by_rollout: ClassVar[bool] = True
    HIGH: ClassVar[float] = 3.0


class SequenceMask(MaskedWeight):
    """weight = r of the whole rollout, as for `sequence_truncate`, within [`correction_low`, `correction_high`], and 0
    outside: TRL's default mode, with its upper bound, 3. Long rollouts are left out more often than short ones.

    Choose it to compare with TRL's GRPOTrainer, and for fresh data of a server that rounds otherwise.
    """

    by_rollout: ClassVar[bool] = True
    HIGH: ClassVar[float] = 3.0


class GeometricMask(BoundedRatio):
    """No weight for rollouts whose exp(mean of log proximal - log behaviour), over their tokens that train, is outside
    [`correction_low`, `correction_high`]. The objective's ratio stays the one to the sampler
    (richardli.xyz/post/rl-collapse-part3). The default bounds 0.99 and 1.01, of SkyRL's examples, are narrow: widen
    them where `correction/masked` is high.

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


class Decoupled(TruncatedWeight):
    """The objective clips p / proximal, and min(r, `correction_high`) weighs each token: decoupled PPO
    (arXiv:2110.00641; AReaL, arXiv:2505.24298, section 5.2), by default with AReaL's bound, 5. With `proximal =
    "recomputed"` the clip never acts in a step's first update.

    Choose it for staleness above 1, with `proximal = "interpolated"`, which costs nothing, or `"last_step"`.
    """

    HIGH: ClassVar[float] = 5.0


CORRECTIONS: dict[str, type[Correction]] = {
    "none": NoCorrection,
    "token_truncate": TokenTruncate,
    "token_mask": TokenMask,
    "sequence_truncate": SequenceTruncate,
    "sequence_mask": SequenceMask,
    "geometric_mask": GeometricMask,
    "decoupled": Decoupled,
}


def build(section: LearnerSection) -> Correction:
    """Make the variant that `learner.correction` names."""
    return CORRECTIONS[section.correction](section)


@dataclass(frozen=True)
class ProximalInputs:
    """Inputs of a proximal policy for N tokens, without a gradient.

    Attributes:
        behaviour: float32 [N], log-probs under the policy that sampled.
        logprobs: float32 [N], log-probs under the policy as the step begins.
        previous: float32 [N], log-probs under the policy before the last optimiser step; None where that is not known.
        staleness: int32 [N], versions between sampling and training.
    """

    behaviour: torch.Tensor
    logprobs: torch.Tensor
    previous: torch.Tensor | None
    staleness: torch.Tensor


def recomputed(inputs: ProximalInputs) -> torch.Tensor:
    """The policy as the step begins (AReaL's and verl's `recompute`, arXiv:2505.24298, section 5.2). The step's first
    update computes it anyway, so it costs nothing.

    Choose it with weights and masks.
    """
    return inputs.logprobs


def last_step(inputs: ProximalInputs) -> torch.Tensor:
    """The policy before the last optimiser step; in a learner's first step the policy itself.

    Choose it with `decoupled` for the paper's own formula, at the price of a pass.
    """
    return inputs.logprobs if inputs.previous is None else inputs.previous


def interpolated(inputs: ProximalInputs) -> torch.Tensor:
    """log proximal = alpha log behaviour + (1 - alpha) log policy, where alpha = 1 / d for a token that is d versions
    old, and 1 where d = 0: A-3PO (arXiv:2512.06547).

    Choose it with `decoupled` for nearly the same without a pass.
    """
    alpha = 1 / inputs.staleness.clamp(min=1)
    return torch.lerp(inputs.behaviour, inputs.logprobs, 1 - alpha)


# Maps each value of `learner.proximal` to a function that returns log-probs under the proximal policy, float32 [N].
PROXIMALS: dict[str, Callable[[ProximalInputs], torch.Tensor]] = {
    "recomputed": recomputed,
    "last_step": last_step,
    "interpolated": interpolated,
}
