"""`top_entropy_quantile`: only tokens where the policy hesitates are learnt from."""

from __future__ import annotations

import math

import torch

from learner.algorithm.masks.base import Mask
from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection

# Nats.
ROUNDING = 1e-5


class TopEntropy(Mask):
    """Keeps the share `top_entropy_quantile` of the step's tokens, those of highest entropy ("Beyond the 80/20 rule",
    arXiv:2506.01939, which takes 0.2); 0 keeps the highest one.

    As TRL's setting of this name, but over all of the step's tokens, where TRL takes those of a micro-batch. Tokens of
    equal entropy stand or go together.

    Choose it for long reasoning, most of whose tokens leave no choice.
    """

    @staticmethod
    def is_set(section: LearnerSection) -> bool:
        return section.top_entropy_quantile < 1

    def __call__(self, tokens: Tokens) -> torch.Tensor:
        if tokens.top_entropy is None:
            raise ValueError("nobody said which tokens have the step's highest entropies: set Tokens.top_entropy")
        return tokens.top_entropy


def kept(entropies: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """Which entropies are at least `lowest`, bool [N]. Those of a context that several rows hold are equal but for
    rounding."""
    return entropies >= lowest - ROUNDING


def lowest_kept(entropies: torch.Tensor, share: float) -> torch.Tensor:
    """The least entropy that is among the highest `share` of a step's entropies, float32 [N], a scalar.

    What is at least this is what is at least `torch.quantile(entropies, 1 - share)`, which takes 16 million at most.
    """
    place = (1 - share) * (len(entropies) - 1)
    # 1 - 0.2 is a little more than 0.8: rounding must not leave a token out.
    return entropies.kthvalue(math.ceil(place - 1e-12 * len(entropies)) + 1).values
