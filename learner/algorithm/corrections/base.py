"""The face of a correction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection


@dataclass(frozen=True)
class Corrected:
    """tokens: with the weights, and the `old` and `old_drift`, that an objective is to use; sums and peaks: as in
    `TokenLosses`, over the tokens that had weight before."""

    tokens: Tokens
    sums: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)


class Correction(ABC):
    """What is done about tokens that another policy sampled: a pure function of tokens, before the objective.

    by_rollout: whether it reads what `Tokens` has of whole rollouts.
    """

    by_rollout: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Corrected: ...

    def figures(self, sums: Mapping[str, float], tokens: int) -> dict[str, float]:
        """What `metrics.jsonl` shows, from a step's `sums` and peaks over the `tokens` that had weight before."""
        return {name: value / tokens for name, value in sums.items()}
