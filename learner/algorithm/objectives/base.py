"""The face of an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens, each field float32 [N].

    logprobs: under the policy that trains; behaviour: under the one that sampled; weights: 0 for tokens that must
    not contribute.
    """

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class TokenLosses:
    """losses: float32 [N], weighted; sums: detached scalars over the tokens, to be added up over a step's rows.

    The step's loss is the sum of `losses` over all of its rows divided by the step's number of tokens with weight.
    """

    losses: torch.Tensor
    sums: dict[str, torch.Tensor]


class Objective(Protocol):
    def __call__(self, tokens: Tokens) -> TokenLosses: ...
