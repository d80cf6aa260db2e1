"""What must be known of all rows before the first backward: forward passes without a gradient, if any is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learner.algorithm.algorithm import Algorithm
from learner.algorithm.rollouts import StepRollouts
from learner.algorithm.router_loss import Routing
from learner.algorithm.tokens import Tokens
from learner.feed.packing import PackedRow
from learner.model.logprobs import TokenScores


@dataclass(frozen=True)
class Known:
    """What is known of a row's N tokens before it trains, each float32 [N], or None where nobody asked.

    logprobs, entropy: under the policy, before the step; reference: log-probs under the reference model; previous:
    log-probs under the policy before the last step; routing: of the row's tokens to experts.
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    previous: torch.Tensor | None = None
    routing: Routing | None = None


class RolloutSums:
    """Sums over whole rollouts, of which a row may hold a part."""

    def __init__(self, rows: Sequence[PackedRow], count: int) -> None:
        self._rows = rows
        self.count = count

    @property
    def split(self) -> bool:
        """Whether a rollout stands in several rows."""
        seen = torch.cat([torch.unique(row.rollout) for row in self._rows])
        return len(seen) > len(torch.unique(seen))

    def drift(self, logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sums of logprobs - behaviour by rollout, float32 [S], from the rows' log-probs, each [N]."""
        sums = torch.zeros(self.count, device=logprobs[0].device)
        for row, of in zip(self._rows, logprobs, strict=True):
            sums.index_add_(0, row.rollout, of - row.behaviour)
        return sums


class Preparation:
    """A step's rollouts, advantages and weights, and what is known of its rows: what a row's `Tokens` are made from."""

    def __init__(
        self,
        algorithm: Algorithm,
        rollouts: StepRollouts,
        sums: RolloutSums,
        known: Sequence[Known],
        device: torch.device,
    ) -> None:
        self.known = known
        self._sums = sums
        self._advantages = torch.from_numpy(algorithm.advantages(rollouts)).to(device)
        self._weights = torch.from_numpy(algorithm.weights(rollouts)).to(device)
        self._lengths = torch.from_numpy(rollouts.tokens).to(device, torch.float32)
        self._drift: torch.Tensor | None = None
        if known[0].logprobs is not None:
            self._drift = sums.drift([of.logprobs for of in known if of.logprobs is not None])

    def tokens(self, row: PackedRow, scores: TokenScores, known: Known) -> Tokens:
        """The row's tokens, with the policy's scores of them."""
        logprobs = scores.logprobs.detach()
        drift = self._of_rollout(row, logprobs, self._drift)
        return Tokens(
            logprobs=scores.logprobs,
            behaviour=row.behaviour,
            old=row.behaviour,
            proximal=logprobs,
            entropy=scores.entropy,
            advantages=self._advantages[row.rollout],
            weights=self._weights[row.rollout],
            staleness=row.staleness,
            rollout=row.rollout,
            lengths=self._lengths[row.rollout],
            drift=drift,
            old_drift=torch.zeros_like(drift),
            proximal_drift=drift,
            reference=known.reference,
        )

    def _of_rollout(self, row: PackedRow, logprobs: torch.Tensor, drift: torch.Tensor | None) -> torch.Tensor:
        """The sum of logprobs - behaviour over each token's rollout, which stands in this row if `drift` is None."""
        if drift is None:
            drift = torch.zeros(self._sums.count, device=logprobs.device)
            drift.index_add_(0, row.rollout, logprobs - row.behaviour)
        return drift[row.rollout]


def survey(policy: torch.nn.Module, rows: Sequence[PackedRow]) -> list[Known]:
    """Log-probs and entropies of all rows under the policy as it is."""
    known = []
    with torch.no_grad():
        for row in rows:
            scores: TokenScores = policy(row)
            known.append(Known(scores.logprobs, scores.entropy, routing=scores.routing))
    return known
