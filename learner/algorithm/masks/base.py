"""The face of a mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from learner.algorithm.step_data import Tokens
from protocol.config import LearnerSection


class Mask(ABC):
    """A pure function of tokens. What it leaves out stays in the normaliser, as in TRL: the rest counts no more.

    by_rollout: whether it reads what `Tokens` has of whole rollouts.
    """

    by_rollout: ClassVar[bool] = False

    def __init__(self, section: LearnerSection) -> None:
        self.section = section

    @staticmethod
    @abstractmethod
    def is_set(section: LearnerSection) -> bool:
        """Whether the run file wants it."""

    @abstractmethod
    def __call__(self, tokens: Tokens) -> torch.Tensor:
        """Which tokens stay, bool [N]."""
