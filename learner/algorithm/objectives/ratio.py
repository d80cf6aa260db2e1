"""What objectives share that have a ratio r = p / p_old, of each token or of its whole rollout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from learner.algorithm.objectives.base import MAX_LOG_RATIO, Objective, TokenLosses
from learner.algorithm.tokens import Tokens


@dataclass(frozen=True)
class Terms:
    """An objective of N tokens, before their weights. losses: float32 [N]; shown: what its figures are the means of, by
    name, each bool or float32 [N] and without a gradient."""

    losses: torch.Tensor
    shown: dict[str, torch.Tensor] = field(default_factory=dict)


class RatioObjective(Objective):
    """A variant is a formula, in `terms`; one with `by_rollout` has a ratio of its own, too.

    Sums: `ratio`, `ratio_squared` and what `terms` shows, over tokens; with `by_rollout` over rollouts, `rollouts` of
    them, as TRL does. `kl`: over tokens always, the k3 estimate of KL(old || policy), r - 1 - log r of each token's own
    ratio (joschu.net/blog/kl-approx.html).
    """

    def __call__(self, tokens: Tokens) -> TokenLosses:
        weighted = tokens.weights > 0
        log_ratio = bounded(tokens.log_ratio())
        own = log_ratio.exp()
        ratio = self.ratio(tokens, own)
        terms = self.terms(tokens, ratio)
        # An infinite log-prob without weight would turn 0 * inf into NaN.
        losses = torch.where(weighted, terms.losses * tokens.weights, 0.0)

        ratio = ratio.detach()
        shown = {"ratio": ratio, "ratio_squared": ratio.square(), **terms.shown}
        share = weighted / tokens.lengths if self.by_rollout else weighted
        sums = {name: (value * share).sum() for name, value in shown.items()}
        sums["kl"] = (own.detach() - 1 - log_ratio.detach()).sum()
        if self.by_rollout:
            sums["rollouts"] = share.sum()
        return TokenLosses(losses, sums)

    def ratio(self, tokens: Tokens, own: torch.Tensor) -> torch.Tensor:
        """What `terms` takes for r, [N], from the tokens' own ratios, which are bounded, and 1 without weight."""
        return own

    @abstractmethod
    def terms(self, tokens: Tokens, ratio: torch.Tensor) -> Terms: ...

    def figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """Means, and in place of `ratio_squared` the effective sample size of the ratios, from 0 to 1:
        `ess` = (sum r)^2 / (n sum r^2). All are 0 where no token has weight."""
        rest = dict(sums)
        kl, squared, count = rest.pop("kl"), rest.pop("ratio_squared"), rest.pop("rollouts", float(tokens))
        means = {name: value / count if count else 0.0 for name, value in rest.items()}
        ess = sums["ratio"] ** 2 / (count * squared) if squared else 0.0
        return {**means, "kl": kl / tokens, "ess": ess}


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_own_gradient(tokens: Tokens, log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of a rollout, [N], from its logarithm without a gradient, as if each token's own log-prob alone stood
    in it: exp(log_ratio) p / sg(p), where sg stops the gradient (GSPO-token, arXiv:2507.18071, section 4.3)."""
    own = torch.where(tokens.weights > 0, tokens.logprobs, 0.0)
    return (bounded(log_ratio) + (own - own.detach())).exp()
