"""Objectives: the loss of each sampled token, from its log-probs and its advantage.

An objective is a pure function of tokens. The loss of a whole rollout is written as one of tokens with the same
gradient, so a rollout may stand in several rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from slipstream.learner.algorithm.step_data import Tokens
from slipstream.protocol.config import LearnerSection

# Beyond this the exponential overflows a float32 sum of squares; no useful ratio is near it.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenLosses:
    """The losses of a row's N tokens, and the sums and peaks for the step's metrics.

    A step's loss is the sum of `losses` over all of its rows. `sums` are added up over the rows; of `peaks` the
    greatest counts (a minimum is the peak of the negated value). A row must give the same names whatever is in it.

    Attributes:
        losses: float32 [N], each times its weight.
        sums: Detached scalars by name, over the tokens with weight or over their rollouts. A weight only says whether a
            token counts; it does not scale the sum.
        peaks: Detached scalars by name.
    """

    losses: torch.Tensor
    sums: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)


class Objective(ABC):
    """The interface of an objective. A variant reads its own settings from `section`.

    Attributes:
        by_rollout: Whether it reads what `Tokens` has of whole rollouts, which has no gradient.
    """

    by_rollout: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @abstractmethod
    def __call__(self, tokens: Tokens) -> TokenLosses:
        """Compute the losses of a row's tokens."""

    def metrics(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Make the metrics of `metrics.jsonl`. Unless a variant overrides it: means over the tokens, under the names
        of the sums.

        Args:
            sums: The step's sums.
            tokens: Number of the step's tokens with weight, at least one.
        """
        return {name: value / tokens for name, value in sums.items()}

    def drift(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        """Return sums that show how far the policy is from the one that sampled.

        Args:
            tokens: The tokens before correction and masks, whose `old` is `behaviour`: neither may hide the drift.
        """
        return {}

    def drift_metrics(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Make the metrics of the sums of `drift`, over the step's `tokens` that had weight then."""
        return {name: value / tokens for name, value in sums.items()}


@dataclass(frozen=True)
class Terms:
    """An objective of N tokens before their weights.

    Attributes:
        losses: float32 [N].
        shown: By name, bool or float32 [N] without a gradient; their means are metrics.
    """

    losses: torch.Tensor
    shown: dict[str, torch.Tensor] = field(default_factory=dict)


class RatioObjective(Objective):
    """An objective with a ratio r = p / p_old, of each token or of its whole rollout.

    A variant is a formula, in `terms`; one with `by_rollout` defines its own `ratio` too.

    Sums: `ratio` and what `terms` shows, over tokens. With `by_rollout` they are over rollouts, `rollouts` of them, as
    in TRL. Sums of `drift`: `ratio`, `ratio_squared` and their `count` likewise; and `kl`, always over tokens: the k3
    estimate of KL(behaviour || policy), r - 1 - log r of each token's own ratio (joschu.net/blog/kl-approx.html).
    """

    def __call__(self, tokens: Tokens) -> TokenLosses:
        weighted = tokens.weights > 0
        ratio = self.ratio(tokens, bounded(tokens.log_ratio()).exp())
        terms = self.terms(tokens, ratio)
        # An infinite log-prob without weight would turn 0 * inf into NaN.
        losses = torch.where(weighted, terms.losses * tokens.weights, 0.0)

        share = self._share(tokens)
        sums = {name: (value * share).sum() for name, value in {"ratio": ratio.detach(), **terms.shown}.items()}
        if self.by_rollout:
            sums["rollouts"] = share.sum()
        return TokenLosses(losses, sums)

    @torch.no_grad()
    def drift(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        log_ratio = bounded(tokens.log_ratio())
        own = log_ratio.exp()
        ratio, share = self.ratio(tokens, own), self._share(tokens)
        return {
            "kl": (own - 1 - log_ratio).sum(),
            "ratio": (ratio * share).sum(),
            "ratio_squared": (ratio.square() * share).sum(),
            "count": share.sum(dtype=torch.float32),
        }

    def _share(self, tokens: Tokens) -> torch.Tensor:
        """Return the weight of each token in sums, [N]. With `by_rollout` the tokens of a rollout count as one."""
        weighted = tokens.weights > 0
        return weighted / tokens.lengths if self.by_rollout else weighted

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        """Return the ratio that `terms` uses.

        Args:
            own: float32 [N], the tokens' own ratios, bounded, and 1 without weight.
        """
        return own

    @abstractmethod
    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        """Compute the formula from the ratio, float32 [N]."""

    def metrics(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Return means; 0 where no token has weight."""
        rest = dict(sums)
        count = rest.pop("rollouts", float(tokens))
        return {name: value / count if count else 0.0 for name, value in rest.items()}

    def drift_metrics(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Return `kl`, a mean, and `ess`, the effective sample size of the ratios to the sampler, from 0 to 1: (sum
        r)^2 / (n sum r^2)."""
        squares = sums["count"] * sums["ratio_squared"]
        return {"kl": sums["kl"] / tokens, "ess": sums["ratio"] ** 2 / squares if squares else 0.0}


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Bound log-ratios by `MAX_LOG_RATIO` on both sides."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_own_gradient(tokens: Tokens, log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the ratio of a rollout with the gradient of each token's own log-prob alone: exp(log_ratio) p / sg(p),
    where sg stops the gradient (GSPO-token, arXiv:2507.18071, section 4.3).

    Args:
        log_ratio: float32 [N], logarithm of the rollout's ratio, without a gradient.

    Returns:
        float32 [N].
    """
    own = torch.where(tokens.weights > 0, tokens.logprobs, 0.0)
    return (bounded(log_ratio) + (own - own.detach())).exp()


class ClipObjective(RatioObjective):
    """loss = -min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A).

    The clip is PPO's (arXiv:1707.06347, eq. 7) with DAPO's two bounds (arXiv:2503.14476, eq. 10). `delta` bounds r
    where A < 0 (dual clip, arXiv:1912.09729; two-sided clipping, arXiv:2505.07291; TRL's `delta`). A token beyond a
    bound has no gradient.

    Sums: `clip_ratio/low_mean` and `clip_ratio/high_mean`, tokens clipped on that side; `clip_ratio/region_mean`, on
    either side, as TRL counts it; `clip_ratio/delta_mean`, tokens beyond delta.
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


class PpoClip(ClipObjective):
    """r = p / p_old of each token (arXiv:1707.06347, eq. 7).

    Choose it first: it is the best known, and tolerates a staleness of a few versions.
    """


class Gspo(ClipObjective):
    """r = exp(mean of log p / p_old over the rollout), so a rollout is clipped as a whole (arXiv:2507.18071, eq. 5 and
    7; written as GSPO-token, section 4.3).

    Choose it for mixtures of experts and for long answers, where the ratios of single tokens are noise.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return with_own_gradient(tokens, tokens.rollout_log_ratio() / tokens.lengths)


class SequenceClip(ClipObjective):
    """r = exp(sum of log p / p_old over the rollout), as in TRL's RLOOTrainer. Each of a rollout's n tokens has 1 / n
    of its loss, so that `normaliser = "rollouts"` gives TRL's mean over rollouts.

    Choose it with `rloo`, and for short answers: the ratio of a long rollout soon leaves any bound.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return with_own_gradient(tokens, tokens.rollout_log_ratio())

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        terms = super().terms(tokens, ratio)
        whole = terms.losses.detach()
        return replace(terms, losses=whole / tokens.lengths + (terms.losses - whole))


class Cispo(RatioObjective):
    """loss = -sg(min(r, 1 + clip_high)) A log p, where sg stops the gradient (arXiv:2506.13585, eq. 4 and 5). No token
    loses its gradient.

    TRL's `epsilon_high` is the bound itself: its 5.0 (ScaleRL, arXiv:2510.13786) is `clip_high = 4.0`. Sum:
    `cispo_clip_ratio`, tokens of positive advantage whose ratio is cut off, as TRL counts it.

    Choose it where a clip would silence rare tokens that matter, and for stale data.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        ratio, highest = ratio.detach(), 1 + self.section.clip_high
        losses = -ratio.clamp(max=highest) * tokens.advantages * tokens.logprobs
        return Terms(losses, {"cispo_clip_ratio": (ratio > highest) & (tokens.advantages > 0)})


class SequenceCispo(Cispo):
    """loss = -sg(min(s, 1 + clip_high)) A log p, with GSPO's s = exp(mean of log p / p_old over the rollout).

    Choose it where cispo's ratios of single tokens are noise, as with mixtures of experts.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return bounded(tokens.rollout_log_ratio() / tokens.lengths).exp()


# Values of `dppo_threshold = "auto"`, which the authors use for each divergence (verl, examples/dppo_trainer).
THRESHOLDS = {"tv": 0.15, "kl": 0.05}

MAX_DPPO_RATIO = 20.0


class Dppo(RatioObjective):
    """loss = -M sg(min(r, 20)) A log p (arXiv:2602.04879, eq. 11; the bound is that of the authors' code in verl).

    M = 0 where the token moved away (r > 1 for A > 0, r < 1 for A < 0) and D > `dppo_threshold` (eq. 12), else 1. D is
    the divergence of two outcomes, this token or any other (eq. 13 and 14): |p - p_old| for "tv", p_old log(p_old / p)
    + (1 - p_old) log((1 - p_old) / (1 - p)) for "kl".

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
        kept = torch.where(away, 0.0, ratio.clamp(max=MAX_DPPO_RATIO))
        shown = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": away}
        return Terms(-kept * advantages * tokens.logprobs, shown)


def _total_variation(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (logprobs.exp() - old.exp()).abs()


def _kl(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return KL(old || policy) of two outcomes, in nats. 1 - p is computed as -expm1(log p), as p near 1 would lose
    its digits."""
    others, old_others = (-torch.expm1(values).clamp(max=-1e-12) for values in (logprobs, old))
    return old.exp() * (old - logprobs) + old_others * (old_others / others).log()


class Sapo(RatioObjective):
    """loss = -sigmoid(tau (r - 1)) (4 / tau) A, where tau is `sapo_temperature_pos` for A > 0 and
    `sapo_temperature_neg` elsewhere (arXiv:2511.20347). The gradient shrinks smoothly as r leaves 1.

    Choose it where a clip takes many tokens away (`clip_ratio/region_mean` above 0.1).
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        taus = self.section.sapo_temperature_pos, self.section.sapo_temperature_neg
        good, bad = (torch.sigmoid(tau * (ratio - 1)) * (4 / tau) for tau in taus)
        return Terms(-torch.where(tokens.advantages > 0, good, bad) * tokens.advantages)


class Vespo(RatioObjective):
    """loss = -phi(w) A log p, where phi(w) = w^k exp(lambda (1 - w)) has no gradient and w = p / p_old is of the whole
    rollout (arXiv:2602.10693; `get_gamma_weights` of TRL 1.16).

    k and lambda are `vespo_k_pos` and `vespo_lambda_pos` where A >= 0, `vespo_k_neg` and `vespo_lambda_neg` elsewhere.
    Sum: `vespo/phi_seq_mean`, phi.

    Choose it for stale data and rollouts whose ratios differ much, without a bound to tune.
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


class Importance(RatioObjective):
    """loss = -r A, where r = p / p_old of each token, without a bound except that a token whose log r is beyond 20 on
    either side has no gradient.

    Choose it to measure what a bound is worth, not to train.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        return Terms(-ratio * tokens.advantages)


class Reinforce(RatioObjective):
    """loss = -A log p (Williams 1992, doi:10.1007/BF00992696).

    Choose it with a correction, or where data is never stale.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        return Terms(-tokens.advantages * tokens.logprobs)


OBJECTIVES: dict[str, type[Objective]] = {
    "ppo_clip": PpoClip,
    "gspo": Gspo,
    "sequence_clip": SequenceClip,
    "cispo": Cispo,
    "sequence_cispo": SequenceCispo,
    "dppo": Dppo,
    "sapo": Sapo,
    "vespo": Vespo,
    "importance": Importance,
    "reinforce": Reinforce,
}


def build(section: LearnerSection) -> Objective:
    """Make the variant that `learner.objective` names."""
    return OBJECTIVES[section.objective](section)
