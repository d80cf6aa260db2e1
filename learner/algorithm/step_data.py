"""Data of a step as an algorithm gets it: rollouts, the tokens of a row, and the normalisers of its loss.

A normaliser is one for the whole step, so neither packing nor micro-batches can change the gradient. Tokens that do not
train never count. A rollout without a token that trains still counts as a rollout, as its reward does in its group: a
step of which much is masked is a smaller step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepRollouts:
    """The S rollouts of a step's groups, as advantages and normalisers see them; a rollout's number is its index.

    Attributes:
        rewards: float64 [S].
        groups: int64 [S], number of each rollout's group, ascending.
        tokens: int64 [S], how many tokens of each train. That may be 0: its reward still counts in its group.
        components: float64 [S, C], value of each reward function, NaN where it gave none. A function whose weight
            differs between groups has a column for each of its weights.
        reward_weights: float64 [C].
        servers: Names of the servers that sampled them.
        roles: int64 [S], number of the role that each played, among those of its group; None where groups have one.
    """

    rewards: Floats
    groups: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    components: Floats
    reward_weights: Floats
    servers: tuple[str, ...] = ()
    roles: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, rewards: Floats, groups: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Self:
        """Make a step with one reward function."""
        return cls(rewards, groups, tokens, rewards[:, None], np.ones(1))

    def __len__(self) -> int:
        return len(self.rewards)

    def by_group(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the numbers of the rollouts that are compared with each other, int64 [G]: those of each group, of each
        role by themselves."""
        starts = np.flatnonzero(np.diff(self.groups, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(self)], strict=True):
            members = np.arange(start, end)
            if self.roles is None:
                yield members
                continue
            roles = self.roles[start:end]
            for role in np.unique(roles):
                yield members[roles == role]

    def take(self, members: npt.NDArray[np.int64]) -> Self:
        """Return some of the rollouts, by their numbers."""
        taken = {name: getattr(self, name)[members] for name in ("rewards", "groups", "tokens", "components")}
        return replace(self, roles=None if self.roles is None else self.roles[members], **taken)

    def with_rewards(self, rewards: Floats) -> Self:
        """Return a copy with other rewards, float64 [S]."""
        return replace(self, rewards=rewards)


@dataclass(frozen=True)
class Tokens:
    """The N tokens of a row that train, as corrections, masks, objectives and regularisers see them.

    Each field is float32 [N] unless it says otherwise. Only `logprobs` and `entropy` have a gradient.

    Attributes:
        logprobs: Log-probs under the policy that trains.
        behaviour: Log-probs under the policy version that sampled the token.
        old: Log-probs that an objective takes its ratio against: `behaviour`, unless a correction moves it.
        proximal: Log-probs under a policy between the two: `logprobs`, unless `learner.proximal` says otherwise.
        entropy: Entropy of the policy's distribution, in nats.
        advantages: Advantage of the token's rollout.
        weights: The token's part in the step's loss, normaliser included; 0 where a mask takes it out.
        staleness: int32 [N], versions between sampling and training.
        rollout: int64 [N], number of the token's rollout in the step.
        lengths: How many tokens of the whole rollout train, in whatever rows they stand.
        drift: Sum of logprobs - behaviour over the whole rollout.
        old_drift: Sum of old - behaviour over the whole rollout.
        proximal_drift: Sum of proximal - behaviour over the whole rollout.
        reference: Log-probs under the reference model; None without one.
        teacher: Log-probs under the teacher; None without one.
        teacher_top: float32 [N, k], log-probs under the teacher of its k likeliest ids, and `others`: under the policy
            that trains; None without `teacher.top_k`.
        top_entropy: bool [N], the tokens that `learner.top_entropy_quantile` keeps; None where it keeps all.
        entropy_weights: The token's part in the step's mean entropy; None where the loss has no such term.
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
    teacher: torch.Tensor | None = None
    teacher_top: torch.Tensor | None = None
    others: torch.Tensor | None = None
    top_entropy: torch.Tensor | None = None
    entropy_weights: torch.Tensor | None = None

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def masked(self, keep: torch.Tensor) -> Self:
        """Return a copy in which the tokens where `keep`, bool [N], is false have no weight."""
        return replace(self, weights=torch.where(keep, self.weights, 0.0))

    def log_ratio(self) -> torch.Tensor:
        """Return logprobs - old; 0 without weight, as a wild value would turn 0 * inf into NaN."""
        return torch.where(self.weights > 0, self.logprobs - self.old, 0.0)

    def rollout_log_ratio(self) -> torch.Tensor:
        """Return the sum of logprobs - old over the token's whole rollout, without a gradient."""
        return self.drift - self.old_drift


def tokens(rollouts: StepRollouts, longest: int) -> Floats:
    """Divides by the step's tokens: every token counts alike (DAPO, arXiv:2503.14476, eq. 8).

    Choose it first.
    """
    return np.full(len(rollouts), 1 / rollouts.tokens.sum())


def sequences(rollouts: StepRollouts, longest: int) -> Floats:
    """Takes the mean over each rollout's tokens, then over the rollouts (GRPO, arXiv:2402.03300, eq. 3).

    Choose it where long answers must not outweigh short ones, and with `gspo`.
    """
    return 1 / (np.maximum(rollouts.tokens, 1) * len(rollouts))


def constant(rollouts: StepRollouts, longest: int) -> Floats:
    """Divides by the number of rollouts times the greatest length (Dr. GRPO, arXiv:2503.20783, section 3.2).

    Choose it with `dr_grpo`, where answers grow longer without growing better.
    """
    return np.full(len(rollouts), 1 / (len(rollouts) * longest))


def rollouts(rollouts: StepRollouts, longest: int) -> Floats:
    """Takes the sum over each rollout's tokens, then the mean over the rollouts (LUSPO, arXiv:2602.05261).

    Choose it with `sequence_clip`, whose losses are of whole rollouts.
    """
    return np.full(len(rollouts), 1 / len(rollouts))


# Maps `learner.normaliser` to a function of the step's rollouts and of the maximum tokens that one may sample. It
# returns, for each rollout, the weight of one of its tokens in the step's loss, float64 [S].
NORMALISERS: dict[str, Callable[[StepRollouts, int], Floats]] = {
    "tokens": tokens,
    "sequences": sequences,
    "constant": constant,
    "rollouts": rollouts,
}
