"""What objectives share that have a ratio r = p / p_old, of each token or of its whole rollout.

The face of an objective.

`objective = "cispo"`: the policy gradient, weighted by a ratio that is cut off.

`objective = "dppo"`: the policy gradient of tokens whose distribution did not move too far.

PPO's clip, of whatever ratio.

`objective = "gspo"`: PPO's clip of the mean ratio of a whole rollout.

`objective = "importance"`: importance sampling, with nothing that bounds the ratio.

`objective = "ppo_clip"`: PPO's clip, against the policy that sampled or the one that a correction names.

`objective = "reinforce"`: the policy gradient, as if the policy itself had sampled.

`objective = "sapo"`: a smooth gate in the place of the clip.

`objective = "sequence_clip"`: PPO's clip of the ratio of a whole rollout.

`objective = "vespo"`: the policy gradient, weighted by a smooth kernel of a whole rollout's ratio.

Objectives, one file a variant: the loss of each sampled token, from its log-probs and its advantage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection

# exp() of more overflows a float32 sum of squares; no useful ratio is near it.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenLosses:
    """losses: float32 [N], each times its weight; sums: by name, detached scalars over the tokens with weight, or over
    their rollouts; a weight counts a token and does not scale it.

    A step's loss is the sum of `losses` over all of its rows. The sums are added up over the rows likewise, and of
    `peaks` each name's greatest counts (a minimum is the peak of what is negated): a row must give the same names
    whatever is in it.
    """

    losses: torch.Tensor
    sums: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)


class Objective(ABC):
    """A pure function of tokens; it reads its own settings from `section`.

    by_rollout: whether it reads what `Tokens` has of whole rollouts. It must use these without a gradient: a loss of a
    whole rollout is written as one of tokens that has the same gradient, so that rollouts may stand in several rows.
    """

    by_rollout: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @abstractmethod
    def __call__(self, tokens: Tokens) -> TokenLosses: ...

    def figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """What `metrics.jsonl` shows, from a step's `sums` over its `tokens` with weight, at least one.

        Unless a variant says otherwise: the mean over the tokens, under the sum's own name.
        """
        return {name: value / tokens for name, value in sums.items()}

    def drift(self, tokens: Tokens) -> dict[str, torch.Tensor]:
        """Sums that show how far the policy is from the one that sampled, as in `TokenLosses`. `tokens`: before
        correction and masks, whose `old` is `behaviour`: neither may hide it."""
        return {}

    def drift_figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """What `metrics.jsonl` shows, from a step's sums of `drift` over its `tokens` that had weight then."""
        return {name: value / tokens for name, value in sums.items()}


@dataclass(frozen=True)
class Terms:
    """An objective of N tokens, before their weights. losses: float32 [N]; shown: what its figures are the means of, by
    name, each bool or float32 [N] and without a gradient."""

    losses: torch.Tensor
    shown: dict[str, torch.Tensor] = field(default_factory=dict)


class RatioObjective(Objective):
    """A variant is a formula, in `terms`; one with `by_rollout` has a ratio of its own, too.

    Sums: `ratio` and what `terms` shows, over tokens; with `by_rollout` over rollouts, `rollouts` of them, as TRL does.
    Sums of `drift`: `ratio` and `ratio_squared` likewise, `count` of them; `kl`, over tokens always, the k3 estimate of
    KL(behaviour || policy), r - 1 - log r of each token's own ratio (joschu.net/blog/kl-approx.html).
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
        """What each token counts for in sums, [N]: with `by_rollout` as much as makes its rollout count once."""
        weighted = tokens.weights > 0
        return weighted / tokens.lengths if self.by_rollout else weighted

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        """What `terms` takes for r, [N], from the tokens' own ratios, which are bounded, and 1 without weight."""
        return own

    @abstractmethod
    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms: ...

    def figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Means; 0 where no token has weight."""
        rest = dict(sums)
        count = rest.pop("rollouts", float(tokens))
        return {name: value / count if count else 0.0 for name, value in rest.items()}

    def drift_figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """`kl`, a mean, and the effective sample size of the ratios to the sampler, from 0 to 1:
        `ess` = (sum r)^2 / (n sum r^2)."""
        squares = sums["count"] * sums["ratio_squared"]
        return {"kl": sums["kl"] / tokens, "ess": sums["ratio"] ** 2 / squares if squares else 0.0}


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_own_gradient(tokens: Tokens, log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of a rollout, [N], from its logarithm without a gradient, as if each token's own log-prob alone stood
    in it: exp(log_ratio) p / sg(p), where sg stops the gradient (GSPO-token, arXiv:2507.18071, section 4.3)."""
    own = torch.where(tokens.weights > 0, tokens.logprobs, 0.0)
    return (bounded(log_ratio) + (own - own.detach())).exp()


class Cispo(RatioObjective):
    """loss = -sg(min(r, 1 + clip_high)) A log p, where sg stops the gradient (arXiv:2506.13585, eq. 4 and 5; as there,
    without a lower bound). No token loses its gradient, however far it moved.

    TRL's `epsilon_high` is the bound itself: its 5.0 (ScaleRL, arXiv:2510.13786) is `clip_high = 4.0`. Sum:
    `cispo_clip_ratio`, as TRL counts it: good tokens whose ratio is cut off.

    Choose it where rare tokens matter, such as those that turn an argument, which a clip would silence; and for stale
    data, as all of it teaches.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        ratio, highest = ratio.detach(), 1 + self.section.clip_high
        losses = -ratio.clamp(max=highest) * tokens.advantages * tokens.logprobs
        return Terms(losses, {"cispo_clip_ratio": (ratio > highest) & (tokens.advantages > 0)})


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


class Gspo(ClipObjective):
    """PPO's clip of s = exp(mean of log p / p_old over the rollout), so that a rollout is clipped whole
    (arXiv:2507.18071, eq. 5 and 7).

    Written as GSPO-token (section 4.3), which has the same loss and gradient where a rollout's tokens have one
    advantage: with `normaliser = "sequences"` it is the paper's. TRL: `importance_sampling_level = "sequence"`.

    Choose it for mixtures of experts and for long answers, whose single tokens' ratios are noise.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return with_own_gradient(tokens, tokens.rollout_log_ratio() / tokens.lengths)


class Importance(RatioObjective):
    """loss = -r A, r = p / p_old of each token: unbiased for one token, and of a variance without bound.

    Only log r is bounded, by 20 on either side, so that float32 holds it: what is beyond has no gradient.

    Choose it to measure what a bound is worth, not to train.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        return Terms(-ratio * tokens.advantages)


class PpoClip(ClipObjective):
    """PPO's clip of each token's own ratio, r = p / p_old (arXiv:1707.06347, eq. 7).

    Choose it first; it is the best known, and holds staleness of a few versions.
    """


class Reinforce(RatioObjective):
    """loss = -A log p (Williams 1992, doi:10.1007/BF00992696), without a ratio: with a correction that weighs tokens
    this is truncated importance sampling (`token_truncate`) or IcePop (`token_mask`). The ratio is shown all the same.

    Choose it beside a correction, or where data is never stale.
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        return Terms(-tokens.advantages * tokens.logprobs)


class Sapo(RatioObjective):
    """loss = -sigmoid(tau (r - 1)) (4 / tau) A, tau = `sapo_temperature_pos` where A > 0, `sapo_temperature_neg`
    elsewhere (arXiv:2511.20347).

    Its derivative by log p is -4 s (1 - s) r A, s the sigmoid: -A at r = 1, and less the farther r is from there.

    Choose it where a clip takes many tokens away (`clip_ratio/region_mean` above 0.1).
    """

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        taus = self.section.sapo_temperature_pos, self.section.sapo_temperature_neg
        good, bad = (torch.sigmoid(tau * (ratio - 1)) * (4 / tau) for tau in taus)
        return Terms(-torch.where(tokens.advantages > 0, good, bad) * tokens.advantages)


class SequenceClip(ClipObjective):
    """PPO's clip of r = p / p_old of the whole rollout, exp(sum of its tokens' log-ratios), as in TRL's RLOOTrainer.

    The loss L of a rollout of n tokens is -min(r A, clip(r) A), and its derivative by each log-prob is that of r alone,
    -r A where nothing is clipped. So a token's loss is L / n with the gradient of L: with `normaliser = "rollouts"`
    these add up to the mean of L over the rollouts, which is TRL's.

    Choose it with `rloo`, and for short answers: the ratio of a whole rollout leaves any bound soon where it is long.
    """

    by_rollout = True

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        return with_own_gradient(tokens, tokens.rollout_log_ratio())

    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms:
        terms = super().terms(tokens, ratio)
        whole = terms.losses.detach()
        return replace(terms, losses=whole / tokens.lengths + (terms.losses - whole))


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


OBJECTIVES: dict[str, type[Objective]] = {
    "ppo_clip": PpoClip,
    "gspo": Gspo,
    "sequence_clip": SequenceClip,
    "cispo": Cispo,
    "dppo": Dppo,
    "sapo": Sapo,
    "vespo": Vespo,
    "importance": Importance,
    "reinforce": Reinforce,
}


def build(section: LearnerSection) -> Objective:
    """The variant that `learner.objective` names."""
    return OBJECTIVES[section.objective](section)
