"""The face of an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from protocol.config import LearnerSection


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of a row, each field float32 [N] but for `staleness`.

    logprobs: under the policy that trains; behaviour: under the one that sampled; advantages: of the token's rollout;
    weights: 0 where the token must not contribute; staleness: int32 [N], versions between sampling and training.
    """

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    staleness: torch.Tensor


@dataclass(frozen=True)
class TokenLosses:
    """losses: float32 [N], 0 without weight; sums: by name, detached scalars over the tokens with weight.

    A step's loss is the sum of `losses` over all of its rows, divided by its number of tokens with weight. The sums are
    added up over the rows likewise: a row must give the same names whatever is in it.
    """

    losses: torch.Tensor
    sums: dict[str, torch.Tensor]


class Objective(ABC):
    """A pure function of tokens; it reads its own settings from `section`."""

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @abstractmethod
    def __call__(self, tokens: Tokens) -> TokenLosses: ...

    def figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """What `metrics.jsonl` shows, from a step's `sums` over its `tokens` with weight.

        Unless a variant says otherwise: the mean over the tokens, under the sum's own name.
        """
        return {name: value / tokens for name, value in sums.items()}
