"""What objectives share that have a ratio r = p / p_old, of each token or of its whole rollout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from learner.algorithm.objectives.base import MAX_LOG_RATIO, Objective, TokenLosses
from learner.algorithm.step_data import Tokens


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
