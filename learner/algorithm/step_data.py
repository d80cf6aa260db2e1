"""The sampled tokens of a row, as corrections and objectives see them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch


@dataclass(frozen=True)
class Tokens:
    """The N tokens of a row that train; each field float32 [N] but for `staleness`, int32, and `rollout`, int64.

    logprobs: under the policy that trains, the only one with a gradient; behaviour: under the one that sampled, at the
    version that did; old: what an objective takes its ratio against, `behaviour` unless a correction moves it;
    proximal: under a policy between the two, `logprobs` without its gradient unless `learner.proximal` says otherwise;
    reference: under the reference model, None where there is none; entropy: of the policy's distribution, in nats,
    with a gradient; entropy_weights: the token's part in the step's mean entropy, None where the loss has none.
    advantages: of the token's rollout; weights: the token's part in the step's loss, the normaliser in it, 0 where a
    mask takes it out; staleness: versions between sampling and training; rollout: number of the token's rollout in the
    step; top_entropy: bool [N], whether `learner.top_entropy_quantile` keeps it, None where it keeps all.

    Of the token's whole rollout, in whatever rows its tokens stand, and without a gradient: lengths, how many of its
    tokens train; drift: the sum of logprobs - behaviour; old_drift, proximal_drift: those of old - behaviour and of
    proximal - behaviour.
    """

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    old: torch.Tensor
    proximal: torch.Tensor
    entropy: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    staleness: torch.Tensor
    rollout: torch.Tensor
    lengths: torch.Tensor
    drift: torch.Tensor
    old_drift: torch.Tensor
    proximal_drift: torch.Tensor
    reference: torch.Tensor | None = None
    top_entropy: torch.Tensor | None = None
    entropy_weights: torch.Tensor | None = None

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def masked(self, keep: torch.Tensor) -> Self:
        """Without the tokens where `keep`, bool [N], is false."""
        return replace(self, weights=torch.where(keep, self.weights, 0.0))

    def log_ratio(self) -> torch.Tensor:
        """logprobs - old, 0 without weight: a wild one would turn 0 * inf into NaN."""
        return torch.where(self.weights > 0, self.logprobs - self.old, 0.0)

    def rollout_log_ratio(self) -> torch.Tensor:
        """The sum of logprobs - old over the token's whole rollout, without a gradient."""
        return self.drift - self.old_drift
