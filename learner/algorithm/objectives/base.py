"""The face of an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
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
