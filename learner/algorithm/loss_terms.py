"""Parts of an algorithm next to objective and correction: masks, regularisers and the loss of a mixture's routers.

A mask takes tokens from the objective. A regulariser adds a term to the loss, or takes one from the rewards, so that
the policy stays near a reference or keeps its entropy. All are off by default, and any may be set next to the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from slipstream.learner.algorithm.objectives import MAX_LOG_RATIO, TokenLosses
from slipstream.learner.algorithm.step_data import Floats, Tokens
from slipstream.protocol.config import LearnerSection


class Mask(ABC):
    """The interface of a mask, a pure function of tokens.

    The tokens that it leaves out stay in the normaliser, as in TRL: the rest counts no more than before.

    Attributes:
        by_rollout: Whether it reads what `Tokens` has of whole rollouts.
    """

    by_rollout: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @staticmethod
    @abstractmethod
    def is_set(section: LearnerSection) -> bool:
        """Return whether the run file sets this mask."""

    @abstractmethod
    def __call__(self, tokens: Tokens) -> torch.Tensor:
        """Return which tokens stay, bool [N]."""


class OffPolicy(Mask):
    """Leaves out tokens of negative advantage in rollouts whose mean of log behaviour - log policy, over those that
    train, is above the threshold: off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, eq. 9; TRL's setting of
    this name).

    Choose it for stale data: bad rollouts that the policy would not make any more are the first to spoil a step.
    """

    by_rollout: ClassVar[bool] = True

    def __init__(self, section: LearnerSection) -> None:
        super().__init__(section)
        self._threshold = section.off_policy_mask_threshold or math.inf

    @staticmethod
    def is_set(section: LearnerSection) -> bool:
        return section.off_policy_mask_threshold is not None

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        far = -tokens.drift / tokens.lengths > self._threshold
        return ~(far & (tokens.advantages < 0))


# Nats by which entropies of one context may differ between rows.
ROUNDING = 1e-5


class TopEntropy(Mask):
    """Keeps the share `top_entropy_quantile` of the step's tokens, those of highest entropy ("Beyond the 80/20 rule",
    arXiv:2506.01939, which takes 0.2); 0 keeps the highest one.

    Choose it for long reasoning, where most tokens leave no choice.
    """

    @staticmethod
    def is_set(section: LearnerSection) -> bool:
        return section.top_entropy_quantile < 1

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        if tokens.top_entropy is None:
            raise ValueError("tokens.top_entropy is None: learner.top_entropy_quantile needs it")
        return tokens.top_entropy


def keep_top_entropy(entropies: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """Return which entropies are at least `lowest`, bool [N]. Entropies of a context that several rows hold are equal
    but for rounding."""
    return entropies >= lowest - ROUNDING


def lowest_kept(entropies: torch.Tensor, share: float) -> torch.Tensor:
    """Return the least entropy among the highest `share` of a step's entropies, as a float32 scalar.

    The entropies that are at least this are those that are at least `torch.quantile(entropies, 1 - share)`, which takes
    16 million at most.
    """
    place = (1 - share) * (len(entropies) - 1)
    # 1 - 0.2 is a little more than 0.8: rounding must not leave a token out.
    return entropies.kthvalue(math.ceil(place - 1e-12 * len(entropies)) + 1).values


MASKS: dict[str, type[Mask]] = {
    "off_policy": OffPolicy,
    "low_entropy": TopEntropy,
}


def build_masks(section: LearnerSection) -> dict[str, Mask]:
    """Make the masks that the run file sets. Keys are their names in metrics."""
    return {name: mask(section) for name, mask in MASKS.items() if mask.is_set(section)}


class Regulariser(ABC):
    """The interface of a term of the loss next to the objective's: a pure function of tokens before any correction. A
    variant reads its own settings from `section`.

    Attributes:
        needs_reference: Whether it reads `Tokens.reference`.
        in_reward: Whether it takes `penalties` from the rewards.
    """

    needs_reference: ClassVar[bool] = False
    in_reward: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @abstractmethod
    def __call__(self, tokens: Tokens) -> TokenLosses:
        """Return the losses to add to the objective's; their sums become metrics, as means over the tokens with
        weight."""

    def penalties(self, reference_drift: Floats) -> Floats:
        """Return the penalty to subtract from each rollout's reward, float64 [S].

        Args:
            reference_drift: float64 [S], sum of reference - behaviour over the rollout's tokens that train.
        """
        raise NotImplementedError


class KlInLoss(Regulariser):
    """loss = kl_coef * k3 for each token, where k3 = exp(d) - d - 1 and d = log p_reference - log p
    (joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300, eq. 4).

    With `kl_bias_correction` it is multiplied by p / p_behaviour, at most `delta`, with its gradient (DeepSeek-V3.2,
    arXiv:2512.02556, eq. 7). Neither importance weights nor masks touch it, as in TRL's GRPOTrainer.

    Sums: `kl_reference`, of the estimates as the loss has them.

    Choose it where the policy must keep what it could before, such as style or other tasks. Tasks with rewards that can
    be checked seldom need it.
    """

    needs_reference = True

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.reference is None:
            raise ValueError("tokens.reference is None: learner.kl_coef needs a reference model")
        weighted = tokens.weights > 0
        distance = torch.where(weighted, tokens.reference - tokens.logprobs, 0.0)
        if self.section.kl_bias_correction:
            estimate = self._corrected(tokens, distance)
        else:
            estimate = _exp(distance) - distance - 1
        losses = self.section.kl_coef * estimate * tokens.weights
        return TokenLosses(losses, {"kl_reference": estimate.detach().sum()})

    def _corrected(self, tokens: Tokens, distance: torch.Tensor) -> torch.Tensor:
        """Return r * (exp(d) - d - 1), where r = p / p_behaviour; its gradient is -r * d.

        The term r * exp(d), which is p_reference / p_behaviour, has no gradient. It is computed from the sum of the
        logarithms, as r and exp(d) may be as small and as large as floats get.
        """
        weighted = tokens.weights > 0
        highest = MAX_LOG_RATIO if self.section.delta == "none" else math.log(self.section.delta)
        log_ratio = torch.where(weighted, tokens.logprobs - tokens.behaviour, 0.0).detach()
        bounded = log_ratio.clamp(-MAX_LOG_RATIO, highest)
        ratio, fixed = bounded.exp(), distance.detach()
        value = _exp(fixed + bounded) - ratio * (1 + fixed)
        return value + ratio * fixed * (distance - fixed)


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(x), continued beyond MAX_LOG_RATIO as a straight line: a wild token still moves towards the
    reference, and nothing overflows."""
    bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
    return bounded.exp() * (1 + log_ratio - bounded)


class KlInReward(Regulariser):
    """reward - kl_coef * sum of log p_behaviour - log p_reference over the rollout's tokens that train, before the
    advantage is computed (RLOO, arXiv:2402.14740, section 2; TRL's RLOOTrainer).

    Sums: `kl_reference`, of the estimates. There is no term in the loss.

    Choose it with `rloo`, as in its paper.
    """

    needs_reference = True
    in_reward = True

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.reference is None:
            raise ValueError("tokens.reference is None: learner.kl_coef needs a reference model")
        estimate = torch.where(tokens.weights > 0, tokens.behaviour - tokens.reference, 0.0)
        return TokenLosses(torch.zeros_like(estimate), {"kl_reference": estimate.sum()})

    def penalties(self, reference_drift: Floats) -> Floats:
        return -self.section.kl_coef * reference_drift


class EntropyBonus(Regulariser):
    """loss = -entropy_coef * H for each token, where H is the entropy, in nats, of the distribution that the sampler
    draws from (PPO, arXiv:1707.06347, eq. 9), as a mean over the step's tokens, whatever the normaliser.

    Choose it, at 0.001 or so, where `entropy` falls to 0 before the reward has risen.
    """

    def __call__(self, tokens: Tokens) -> TokenLosses:
        if tokens.entropy_weights is None:
            raise ValueError("tokens.entropy_weights is None: learner.entropy_coef needs them")
        entropy = torch.where(tokens.weights > 0, tokens.entropy, 0.0)
        return TokenLosses(-self.section.entropy_coef * entropy * tokens.entropy_weights, {})


def build_regularisers(section: LearnerSection) -> list[Regulariser]:
    """Make the regularisers with a coefficient above 0."""
    found: list[Regulariser] = []
    if section.kl_coef:
        found.append(KlInReward(section) if section.kl_in_reward else KlInLoss(section))
    if section.entropy_coef:
        found.append(EntropyBonus(section))
    return found


# Sums of `cross_entropy`.
_TAUGHT, _TAUGHT_LOSS, _TAUGHT_BEST = "taught tokens", "taught loss", "taught best"


def nothing_taught(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the sums of `cross_entropy` over no tokens: all ranks need the same names."""
    zero = torch.zeros((), device=device)
    return {_TAUGHT: zero.long(), _TAUGHT_LOSS: zero, _TAUGHT_BEST: zero.long()}


def cross_entropy(logprobs: torch.Tensor, best: torch.Tensor, weight: float) -> TokenLosses:
    """loss = -weight * log p of each token of demonstrations: maximum likelihood, no other part of the algorithm.

    Args:
        logprobs: float32 [N], at temperature 1.
        best: bool [N], the tokens that greedy sampling would take.
        weight: Coefficient divided by the step's tokens of demonstrations.
    """
    sums = {_TAUGHT: torch.tensor(len(logprobs)), _TAUGHT_LOSS: -logprobs.detach().sum(), _TAUGHT_BEST: best.sum()}
    return TokenLosses(-weight * logprobs, sums)


def taught_metrics(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the mean cross entropy in nats, and the share of tokens that greedy sampling would take; empty without
    demonstrations."""
    if not (tokens := int(sums[_TAUGHT])):
        return {}
    return {
        "demonstrations/loss": float(sums[_TAUGHT_LOSS]) / tokens,
        "demonstrations/mean_token_accuracy": float(sums[_TAUGHT_BEST]) / tokens,
    }


@dataclass(frozen=True)
class Routing:
    """How a row's tokens were routed, summed over tokens and layers. A token that sequences share counts for each of
    them.

    Attributes:
        chosen: float32 [E], how often each expert was chosen.
        probabilities: float32 [E], sums of the router's probabilities, differentiable.
        tokens: float32 scalar, tokens x layers.
    """

    chosen: torch.Tensor
    probabilities: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, logits: Sequence[torch.Tensor], top_k: int, copies: torch.Tensor) -> Self:
        """Sum the routing of a row.

        Args:
            logits: Logits of each layer's router, [T, E].
            top_k: Experts per token.
            copies: [T], how many sequences have each token.
        """
        counts = copies.float()
        experts = logits[0].shape[-1]
        chosen = torch.zeros(experts, device=counts.device)
        sums = torch.zeros_like(chosen)
        for layer in logits:
            probabilities = layer.float().softmax(-1)
            best = probabilities.detach().topk(top_k, dim=-1).indices
            chosen = chosen.index_add(0, best.flatten(), counts.repeat_interleave(top_k))
            sums = sums + counts @ probabilities
        return cls(chosen, sums, counts.sum() * len(logits))


class RouterLoss:
    """The auxiliary loss that keeps a mixture's experts evenly used: E * sum over experts e of f_e * P_e, where f_e is
    the share of a token's k choices that go to e and P_e the probability that the router gives e, both means over the
    step's tokens and layers (Switch Transformer, arXiv:2101.03961, eq. 4-6; transformers' `load_balancing_loss_func`).
    It is exact for a whole step, however its rows are packed.

    Choose it for long runs of a mixture, whose routers drift; its model's own config names the coefficient.
    """

    def __init__(
        self,
        coefficient: float,
        rows: Sequence[Routing],
        add_up: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """Take the routing of a step.

        Args:
            coefficient: Factor of the loss.
            rows: The routing of all rows of the step, without a gradient; of this rank's rows where there are several
                ranks.
            add_up: Returns the sum over the ranks.
        """
        self._coefficient = coefficient
        tokens = add_up(torch.stack([row.tokens for row in rows]).sum())
        chosen = add_up(torch.stack([row.chosen.detach() for row in rows]).sum(0))
        # The loss is linear in the probabilities with this slope, [E].
        self._slope = len(rows[0].chosen) * chosen / tokens**2

    def share(self, row: Routing) -> torch.Tensor:
        """Return a row's part in the loss before the coefficient, a scalar; the parts of all rows add up to the
        loss."""
        return (self._slope * row.probabilities).sum()

    def __call__(self, row: Routing) -> torch.Tensor:
        return self._coefficient * self.share(row)
