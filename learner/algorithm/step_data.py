"""The sampled tokens of a row, as corrections and objectives see them.

The rollouts of a step, as advantages and normalisers see them.

What the losses of a step's tokens are divided by, of which there is one for the whole step: so neither packing nor
micro-batches can change the gradient. Tokens that do not train never count; a rollout without one that trains counts
as a rollout, as its reward does in its group: where much is masked, a step is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
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


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of a step's groups, S of them; a rollout's number is its place here.

    rewards: float64 [S]; groups: int64 [S], the number of each one's group, ascending; tokens: int64 [S], how many of
    its tokens train, which may be none: its reward is in the group all the same. components: float64 [S, C], what each
    reward function gave, NaN where it gave nothing; reward_weights: float64 [C]. A function whose weight is not the
    same in all groups has a column for each of its weights. servers: names of the vLLM servers that sampled them.
    """

    rewards: Floats
    groups: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    components: Floats
    reward_weights: Floats
    servers: tuple[str, ...] = ()

    @classmethod
    def of(cls, rewards: Floats, groups: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Self:
        """Of one reward function."""
        return cls(rewards, groups, tokens, rewards[:, None], np.ones(1))

    def __len__(self) -> int:
        return len(self.rewards)

    def by_group(self) -> Iterator[npt.NDArray[np.int64]]:
        """The numbers of each group's rollouts."""
        starts = np.flatnonzero(np.diff(self.groups, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(self)], strict=True):
            yield np.arange(start, end)

    def take(self, members: npt.NDArray[np.int64]) -> Self:
        """Some of the rollouts."""
        taken = {name: getattr(self, name)[members] for name in ("rewards", "groups", "tokens", "components")}
        return replace(self, **taken)

    def with_rewards(self, rewards: Floats) -> Self:
        return replace(self, rewards=rewards)


def tokens(rollouts: StepRollouts, longest: int) -> Floats:
    """One over the step's tokens: every token counts alike (DAPO, arXiv:2503.14476, eq. 8; TRL's `dapo`, and its `bnpo`
    where the whole step is one batch).

    Choose it first.
    """
    return np.full(len(rollouts), 1 / rollouts.tokens.sum())


def sequences(rollouts: StepRollouts, longest: int) -> Floats:
    """Each rollout's mean over its tokens, and the mean over the rollouts (GRPO, arXiv:2402.03300, eq. 3; TRL's
    `grpo`).

    Choose it where long answers must not outweigh short ones, and with `gspo`.
    """
    return 1 / (np.maximum(rollouts.tokens, 1) * len(rollouts))


def constant(rollouts: StepRollouts, longest: int) -> Floats:
    """One over rollouts times the greatest length: no length is favoured (Dr. GRPO, arXiv:2503.20783, section 3.2;
    TRL's `dr_grpo`).

    Choose it with `dr_grpo`, where answers grow longer without growing better.
    """
    return np.full(len(rollouts), 1 / (len(rollouts) * longest))


def rollouts(rollouts: StepRollouts, longest: int) -> Floats:
    """One over the rollouts: the sum over a rollout's tokens, and the mean over the rollouts (LUSPO, arXiv:2602.05261;
    TRL's `luspo`, and its RLOOTrainer).

    Choose it with `sequence_clip`, whose losses are of whole rollouts.
    """
    return np.full(len(rollouts), 1 / len(rollouts))


# By `learner.normaliser`: from a step's rollouts and the most tokens that one may sample, the weight of a token in the
# step's loss, float64 [S], by rollout.
NORMALISERS: dict[str, Callable[[StepRollouts, int], Floats]] = {
    "tokens": tokens,
    "sequences": sequences,
    "constant": constant,
    "rollouts": rollouts,
}
